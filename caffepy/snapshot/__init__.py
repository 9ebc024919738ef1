"""Snapshots: reads and writes .caffemodel and .solverstate, binary and HDF5, of both Caffes and all versions.

net and all higher layers import it.
"""
