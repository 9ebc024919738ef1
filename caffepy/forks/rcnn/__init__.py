"""Nets of regions: Faster R-CNN, R-FCN, MNC, MS-CNN."""
