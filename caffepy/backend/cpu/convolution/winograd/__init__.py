"""Convolutions by 3x3 windows of stride 1 as Winograd computes them. backend/cpu/convolution/choice.py imports it."""
