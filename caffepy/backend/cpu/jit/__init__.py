"""Compiles CPU kernels, keeps them in the cache folder and runs them on threads. cpu and data import it."""
