"""Reads and writes .caffemodel and .solverstate, binary and HDF5, of both Caffes and any age.

net and every part above import it.
"""
