"""Snapshots in Caffe's formats, binary and HDF5, written atomically. solvers, cli and parallel import it."""
