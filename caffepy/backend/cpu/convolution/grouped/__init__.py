"""Convolutions in groups on the CPU. direct imports it."""
