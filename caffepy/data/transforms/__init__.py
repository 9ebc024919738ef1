"""Random changes of images and of the boxes in them: sizes, colors, noise, patches, and DetectNet's coverage maps.

The root of data, data/loaders and layers/input import it.
"""
