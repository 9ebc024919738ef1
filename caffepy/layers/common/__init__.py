"""Layers that combine, reshape, reduce or multiply blobs."""
