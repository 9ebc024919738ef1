"""Layers that a user wrote in Python: the layer type, the blobs that it hands out, and how its class is found.

Nothing outside imports it; types register themselves.
"""
