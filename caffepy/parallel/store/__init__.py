"""A key-value store that rank 0 holds, and the authenticated control channel to it; communicators, control and
distributed import it.
"""
