"""Convolutions on the GPU: `plan.py` plans one, with algorithms that `autotune.py` chooses.

cuda/backend imports it.
"""
