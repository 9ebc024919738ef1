"""Convolutions on the GPU: `plan.py` plans one, of the algorithms in `registry.py`, by trial (`autotune.py`).

cuda/backend imports it.
"""
