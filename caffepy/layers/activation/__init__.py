"""Elementwise layers. Found by name. Nothing imports it."""
