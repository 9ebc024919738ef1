"""Convolutions of small problems by own kernels: kernels/small_convolution.cu. registry.py imports it."""
