"""Annotated images of rectangles, for small detectors that learn to find them."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np

from caffepy.formats.proto import caffe_pb2

SIZE, CLASSES = 48, 3
"""Pixels of a side; the background, bright rectangles and dark ones."""


def rectangles(rng: np.random.Generator) -> caffe_pb2.AnnotatedDatum:
    """A grey, noisy image with one rectangle in its left half and one in its right half."""
    image = rng.normal(128, 12, (3, SIZE, SIZE))
    record = caffe_pb2.AnnotatedDatum(type=caffe_pb2.AnnotatedDatum.BBOX)
    for left in (0, SIZE // 2):
        height, width = rng.integers(10, (32, 22))
        y, x = rng.integers(0, SIZE - height), left + rng.integers(0, SIZE // 2 - width)
        label = int(rng.integers(1, CLASSES))
        image[:, y : y + height, x : x + width] += 90 if label == 1 else -90
        group = record.annotation_group.add(group_label=label)
        corners = zip(("xmin", "ymin", "xmax", "ymax"), (x, y, x + width, y + height), strict=True)
        group.annotation.add(bbox={name: float(value) / SIZE for name, value in corners})
    record.datum.channels, record.datum.height, record.datum.width = image.shape
    record.datum.data = image.clip(0, 255).astype(np.uint8).tobytes()
    return record


def write_images(path: Path, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    with lmdb.open(str(path), map_size=2**26) as environment, environment.begin(write=True) as transaction:
        for item in range(count):
            transaction.put(f"{item:05}".encode(), rectangles(rng).SerializeToString())
    return str(path)
