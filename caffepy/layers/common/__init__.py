"""Layers that combine, reshape or multiply blobs. Found by name; net/fusion imports its classes."""
