"""Spatial transformers and their losses."""
