"""Random augmentation of images and their boxes: size, color, noise, patches; imported by data and layers/input."""
