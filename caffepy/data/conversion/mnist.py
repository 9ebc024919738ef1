"""A pair of idx files as a database, as Caffe's `convert_mnist_data.cpp` makes it."""

from __future__ import annotations

from pathlib import Path

from caffepy.data.conversion.image_sets import Database
from caffepy.data.sources.lmdb_write import write_datums
from caffepy.data.sources.mnist import digit_datums, parse_images, parse_labels, read_idx
from caffepy.data.sources.record_write import check_free
from caffepy.errors import DataError

_MAX_CLASSES = 128
"""Caffe's labels are C's char here."""


def convert_digits(images_file: Path, labels_file: Path, target: Database) -> int:
    """Make a database of an idx file of images and one of labels, packed by gzip or not.

    Returns:
        The number of records.

    Raises:
        DataError: a file is no idx file, the two do not belong together, or there is something at the database's path.
        RunError: the database cannot be written.
    """
    check_free(target.path, target.force)
    images = parse_images(read_idx(images_file), str(images_file))
    labels = parse_labels(read_idx(labels_file), str(labels_file), _MAX_CLASSES)
    if len(images) != len(labels):
        raise DataError(f"{images_file} has {len(images)} images and {labels_file} {len(labels)} labels")
    return write_datums(target.path, digit_datums(images, labels), target.force, target.backend)
