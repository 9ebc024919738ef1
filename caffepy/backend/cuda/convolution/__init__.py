"""Convolutions on the GPU: `plan.py` plans one, with algorithms from `registry.py` chosen by `autotune.py`.

cuda/backend imports it.
"""
