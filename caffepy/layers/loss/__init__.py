"""Losses and Accuracy. Found by name. layers/detection imports its base."""
