"""Predictions for image files: classes of images and windows, and boxes of an SSD.

Imported by cli and pycaffe.
"""

from caffepy.predict.detect import Box, detect, draw_boxes
from caffepy.predict.images import InputImage, Preparation, Steps, list_images
from caffepy.predict.model import Model, classify
from caffepy.predict.windows import Window, classify_windows, read_windows

__all__ = [
    "Box",
    "InputImage",
    "Model",
    "Preparation",
    "Steps",
    "Window",
    "classify",
    "classify_windows",
    "detect",
    "draw_boxes",
    "list_images",
    "read_windows",
]
