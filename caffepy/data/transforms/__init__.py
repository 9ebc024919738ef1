"""Random changes of images and of the boxes in them: sizes, colors, noise, patches.

The root of data and layers/input import it.
"""
