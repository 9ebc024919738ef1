"""Writes the prototxts of the larger nets: `python models/generate.py`."""
