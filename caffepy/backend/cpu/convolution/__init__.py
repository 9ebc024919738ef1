"""Convolutions on the CPU; `choose.py` chooses the algorithm. cpu/backend imports it."""
