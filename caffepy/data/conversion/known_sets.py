"""MNIST's and CIFAR-10's files as databases (Caffe's `convert_mnist_data.cpp` and `convert_cifar_data.cpp`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.conversion.image_sets import Database
from caffepy.data.conversion.mean import compute_mean, write_mean
from caffepy.data.sources.lmdb_write import write_datums
from caffepy.data.sources.mnist import digit_datums, parse_images, parse_labels, read_idx
from caffepy.data.sources.record_write import check_free
from caffepy.errors import DataError
from caffepy.files import read_regular
from caffepy.proto import caffe_pb2

# -- MNIST ---------------------------------------------------------------------------------------------


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


# -- CIFAR-10 ------------------------------------------------------------------------------------------


_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE
"""A label and three planes."""
_MAX_BYTES = 1 << 30
_PARTS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


def convert_cifar(source: Path, target: Path, backend: str = "lmdb", force: bool = False) -> dict[Path, int]:
    """Make ``cifar10_train_lmdb``, ``cifar10_test_lmdb`` and ``mean.binaryproto``, the mean of the former, in a folder.

    Args:
        source: the folder of the binary version's files.
        target: where to put the databases.
        backend: lmdb or leveldb, which is also the end of their names.
        force: replace what is there.

    Returns:
        The records of each database.

    Raises:
        DataError: a file is missing or is none of CIFAR-10's, or there is something at a database's path.
        RunError: writing failed.
    """
    paths = {part: target / f"cifar10_{part}_{backend}" for part in _PARTS}
    for path in paths.values():
        check_free(path, force)
    images = {part: [_read(source / name) for name in names] for part, names in _PARTS.items()}
    counts = {path: write_datums(path, _datums(images[part]), force, backend) for part, path in paths.items()}
    write_mean(target / "mean.binaryproto", compute_mean(paths["train"], backend))
    return counts


def _read(path: Path) -> NDArray[np.uint8]:
    """The records of a file: (N, 1 + 3072)."""
    try:
        content = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(
            f"'{os.fspath(path)}' cannot be read: {error.strerror}; give the folder of CIFAR-10's binary version"
        ) from error
    if not content or len(content) % _RECORD:
        raise DataError(
            f"'{os.fspath(path)}' has {len(content)} bytes, no whole number of CIFAR-10's records of {_RECORD}; get it "
            "again"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, _RECORD)


def _datums(files: list[NDArray[np.uint8]]) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    """Keys and records as Caffe writes them: the keys have five digits."""
    number = 0
    for records in files:
        for record in records:
            data, label = record[1:].tobytes(), int(record[0])
            datum = caffe_pb2.Datum(channels=3, height=_SIDE, width=_SIDE, data=data, label=label)
            yield f"{number:05d}".encode(), datum
            number += 1
