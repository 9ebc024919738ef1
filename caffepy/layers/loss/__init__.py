"""Losses and Accuracy. Found by name."""
