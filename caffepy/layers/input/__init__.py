"""Data layers: Input, DummyData, Data, ImageData, HDF5Data. Found by name; net imports its prefetching."""
