"""Convolution, pooling and resampling of images."""
