"""Record sources and writers: LMDB, LevelDB, image lists, MNIST files; imported by data, layers/input and cli."""
