"""Kernels of our own for shapes that cuDNN's plans leave the device idle for. cuda/convolution/registry imports it."""
