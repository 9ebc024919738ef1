"""Losses and Accuracy."""
