"""Layers of several forks that move, gather and convert values."""
