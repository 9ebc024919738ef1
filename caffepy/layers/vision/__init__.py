"""Convolution and pooling. Found by name; net/fusion imports its classes."""
