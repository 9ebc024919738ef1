"""Predictions for image files: classes of images and windows, and boxes of an SSD.

Imported by cli and pycaffe.
"""

from caffepy.predict.detect import Box, detect, draw_boxes
from caffepy.predict.images import Preparation, image_files, read_images
from caffepy.predict.model import Model, classify
from caffepy.predict.windows import Window, classify_windows, read_windows

__all__ = [
    "Box",
    "Model",
    "Preparation",
    "Window",
    "classify",
    "classify_windows",
    "detect",
    "draw_boxes",
    "image_files",
    "read_images",
    "read_windows",
]
