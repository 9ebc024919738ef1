"""Loaders of data other than plain images: images with boxes, windows of images, frames of videos.

layers/input imports it.
"""
