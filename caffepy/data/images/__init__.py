"""Datum parsing, image decoding, mean images and the bulk copy into batches. Used by data, layers/input and cli."""
