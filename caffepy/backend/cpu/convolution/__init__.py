"""Convolutions on the CPU; `plan.py` says which way each is computed. cpu/backend imports that."""
