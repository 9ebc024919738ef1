"""Random augmentation of images and their boxes: size, color, noise, patches."""
