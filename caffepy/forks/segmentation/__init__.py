"""Nets that label each pixel: SegNet, PSPNet, DeepLab, DeconvNet, CRF as RNN."""
