"""Conversion of MNIST and CIFAR-10 to databases (Caffe's `convert_mnist_data.cpp`, `convert_cifar_data.cpp`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.conversion.image_sets import Database
from caffepy.data.conversion.mean import compute_mean, write_mean
from caffepy.data.sources.mnist import digit_datums, parse_images, parse_labels, read_idx
from caffepy.data.sources.record_write import check_overwrite, record_key, write_datums
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import check_output, read_regular

# -- MNIST ---------------------------------------------------------------------------------------------


_MAX_CLASSES = 128
"""Caffe's converter stores labels as C char."""


def convert_digits(images_file: Path, labels_file: Path, target: Database) -> int:
    """Create a database from an idx file of images and one of labels, gzipped or not.

    Returns:
        The number of records.

    Raises:
        DataError: a file is not an idx file, the numbers of images and labels differ, or the database exists.
        RunError: writing failed.
    """
    check_overwrite(target.path, target.force)
    images, labels = _read_digits(images_file, labels_file)
    return write_datums(target.path, digit_datums(images, labels), target.force, target.backend)


def convert_digit_pairs(images_file: Path, labels_file: Path, target: Database, seed: int) -> int:
    """Create a database of random pairs of images, as Caffe's `convert_mnist_siamese_data.cpp`.

    A Datum has both images as its channels. Its label is 1 if the labels of the images are equal, else 0. There are as
    many pairs as images.

    Args:
        images_file: an idx3 file, gzipped or not.
        labels_file: an idx1 file, gzipped or not.
        target: the database.
        seed: of the pairs.

    Returns:
        The number of records.

    Raises:
        DataError: a file is not an idx file, the numbers of images and labels differ, or the database exists.
        RunError: writing failed.
    """
    check_overwrite(target.path, target.force)
    images, labels = _read_digits(images_file, labels_file)
    pairs = np.random.default_rng(seed).integers(len(images), size=(len(images), 2))
    return write_datums(target.path, _pair_datums(images, labels, pairs), target.force, target.backend)


def _pair_datums(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], pairs: NDArray[np.int64]
) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    _, height, width = images.shape
    for number, pair in enumerate(pairs):
        first, second = labels[pair]
        data = images[pair].tobytes()
        datum = caffe_pb2.Datum(channels=2, height=height, width=width, data=data, label=int(first == second))
        yield record_key(number), datum


def _read_digits(images_file: Path, labels_file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images and labels of two idx files: (N, H, W) and (N,)."""
    images = parse_images(read_idx(images_file), str(images_file))
    labels = parse_labels(read_idx(labels_file), str(labels_file), _MAX_CLASSES)
    if len(images) != len(labels):
        raise DataError(f"{images_file} has {len(images)} images and {labels_file} {len(labels)} labels")
    return images, labels


# -- CIFAR-10 ------------------------------------------------------------------------------------------


_SIDE = 32
_RECORD_BYTES = 1 + 3 * _SIDE * _SIDE
"""Bytes of a record: a label and three planes."""
_MAX_BYTES = 1 << 30
_SPLITS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


def convert_cifar(source: Path, target: Path, backend: str = "lmdb", force: bool = False) -> dict[Path, int]:
    """Create ``cifar10_train_lmdb``, ``cifar10_test_lmdb`` and the training set's ``mean.binaryproto`` in a folder.

    Args:
        source: folder of CIFAR-10's binary version.
        target: folder of the databases.
        backend: lmdb or leveldb; also the suffix of the databases' names.
        force: replace existing databases and an existing mean.

    Returns:
        The number of records of each database.

    Raises:
        ConfigError: the mean exists.
        DataError: a file is missing or not from CIFAR-10, or a database exists.
        RunError: writing failed.
    """
    paths = {split: target / f"cifar10_{split}_{backend}" for split in _SPLITS}
    for path in paths.values():
        check_overwrite(path, force)
    mean = target / "mean.binaryproto"
    if os.path.lexists(mean):
        check_output(mean, force)
    images = {split: [_read(source / name) for name in names] for split, names in _SPLITS.items()}
    counts = {path: write_datums(path, _datums(images[split]), force, backend) for split, path in paths.items()}
    write_mean(mean, compute_mean(paths["train"], backend))
    return counts


def _read(path: Path) -> NDArray[np.uint8]:
    """Read the records of a file: (N, 1 + 3072)."""
    try:
        content = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(
            f"'{os.fspath(path)}' cannot be read: {error.strerror}; pass the folder of CIFAR-10's binary version"
        ) from error
    if not content or len(content) % _RECORD_BYTES:
        raise DataError(
            f"'{os.fspath(path)}' has {len(content)} bytes, not a multiple of CIFAR-10's record size {_RECORD_BYTES}; "
            "download it again"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)


def _datums(files: list[NDArray[np.uint8]]) -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
    """Yield keys and Datums as Caffe writes them, with keys of five digits."""
    number = 0
    for records in files:
        for record in records:
            data, label = record[1:].tobytes(), int(record[0])
            datum = caffe_pb2.Datum(channels=3, height=_SIDE, width=_SIDE, data=data, label=label)
            yield f"{number:05d}".encode(), datum
            number += 1
