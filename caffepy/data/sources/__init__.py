"""Records on disk: LMDB, LevelDB, lists of images, MNIST's files. data, layers/input and cli import it."""
