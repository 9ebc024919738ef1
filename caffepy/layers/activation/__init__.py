"""Elementwise layers. Found by name."""
