"""Record sources and writers: LMDB, LevelDB, image lists, MNIST files. Used by data, layers/input and cli."""
