"""Layers that bring data into a net. Found by name; net imports its prefetching."""
