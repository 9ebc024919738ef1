"""Layers that combine, reshape or multiply blobs. Found by name; net/fuse and net/fold import its classes."""
