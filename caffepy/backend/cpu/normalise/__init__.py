"""Batch normalisation on the CPU and the gradient of ReLU: kernels of their own. backend.py imports it."""
