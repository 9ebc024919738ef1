"""BatchNorm, LRN, Scale and Bias. Found by name; net/fuse and net/fold import its classes."""
