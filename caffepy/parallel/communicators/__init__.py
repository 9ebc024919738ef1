"""Collectives between devices, one file a transport. Everything above in parallel, and distributed, import it."""
