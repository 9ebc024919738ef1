"""Convolutions on the CPU; `plan.py` chooses the algorithm. cpu/backend imports it."""
