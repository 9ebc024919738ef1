"""Data layers, and HDF5Output."""
