"""Pooling windows over channels-last images: memory (N, H, W, C), all channels of a pixel next to each other.

backend.py imports it.
"""
