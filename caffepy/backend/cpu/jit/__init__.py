"""Compilation, caching and multithreaded execution of CPU kernels. cpu and data import it."""
