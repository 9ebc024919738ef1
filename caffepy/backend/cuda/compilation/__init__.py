"""NVRTC in this process and in others, its results in the cache folder, and which kernels a net will ask for.

cuda/compiler.py imports it.
"""
