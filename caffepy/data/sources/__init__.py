"""Record sources and writers: LMDB, LevelDB, image lists; imported by data, layers/input and cli."""
