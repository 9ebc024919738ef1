"""Convolutions on the CPU. cpu imports it."""
