"""Normalisation layers, Scale and Bias."""
