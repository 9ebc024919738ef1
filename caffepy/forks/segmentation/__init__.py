"""Nets that label each pixel: SegNet, PSPNet, DeepLab."""
