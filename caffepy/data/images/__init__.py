"""Datums, mean images and the copying of images into batches. data, layers/input and cli import it."""
