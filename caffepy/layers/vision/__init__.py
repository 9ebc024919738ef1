"""Convolution and pooling. Found by name; net/fuse and net/fold import its classes."""
