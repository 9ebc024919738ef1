"""Datum parsing, image decoding, mean images and the bulk copy into batches; imported by data, layers/input and cli."""
