"""The CPU backend, on NumPy and numba. Only `caffepy.backend` imports it; data imports `cpu/jit`."""
