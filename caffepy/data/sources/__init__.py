"""Records on disk: LMDB, HDF5, lists of images, MNIST's files. data, layers/input and cli import it."""
