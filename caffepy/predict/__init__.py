"""What trained nets say of image files: classes, and boxes of an SSD."""

from caffepy.predict.classify import classify
from caffepy.predict.detect import Box, detect, draw_boxes
from caffepy.predict.images import Preparation, image_files, read_images
from caffepy.predict.model import Model

__all__ = ["Box", "Model", "Preparation", "classify", "detect", "draw_boxes", "image_files", "read_images"]
