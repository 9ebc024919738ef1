"""Nets for phones: MobileNet, ShuffleNet and their activations."""
