"""The mean image of a database, as Caffe's `compute_image_mean.cpp` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.conversion.ordered import ordered_map
from caffepy.data.conversion.progress import Progress, all_cores
from caffepy.data.images.datum import datum_shape, decode_image, parse_datum
from caffepy.data.sources.leveldb import LevelDbSource, is_leveldb
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.source import RecordSource
from caffepy.errors import DataError
from caffepy.files import atomic_write
from caffepy.proto import caffe_pb2

_RECORDS = 64
"""Of one thread's share."""

Sum = NDArray[np.float64]
Values = NDArray[np.uint8] | NDArray[np.float32]


def open_source(path: Path, backend: str) -> RecordSource:
    """The records of a database; one of the other kind than `backend` is taken for what it is, as by data layers.

    Raises:
        DataError: it cannot be read.
    """
    leveldb = is_leveldb(path) or (backend == "leveldb" and not (path / "data.mdb").exists())
    return LevelDbSource(path) if leveldb else LmdbSource(path)


def compute_mean(
    path: Path, backend: str = "lmdb", threads: int | None = None, progress: Progress | None = None
) -> NDArray[np.float32]:
    """The mean of a database's images: (C, H, W).

    Sums of bytes are exact; Caffe's are rounded to float32 at each step.

    Args:
        path: the database.
        backend: lmdb or leveldb.
        threads: that read and decode; None: all cores.
        progress: is told how far it is.

    Raises:
        DataError: it cannot be read, or its images differ in size.
    """
    source, progress = open_source(path, backend), progress or Progress()
    try:
        count = progress.total = len(source)
        threads = threads or all_cores()
        if not source.concurrent(count):
            threads = 1
        shape = _image(source, 0).shape
        total = np.zeros(shape, np.float64)
        shares = (range(first, min(first + _RECORDS, count)) for first in range(0, count, _RECORDS))
        for part, done in ordered_map(partial(_sum_of, source, shape), shares, threads):
            total += part
            progress.advance(done)
    finally:
        source.close()
    progress.finish(count)
    return (total / count).astype(np.float32)


def write_mean(path: Path, mean: NDArray[np.float32]) -> None:
    """Write a mean as the BlobProto that `mean_file` names.

    Raises:
        RunError: it cannot be written.
    """
    channels, height, width = mean.shape
    blob = caffe_pb2.BlobProto(num=1, channels=channels, height=height, width=width, data=mean.ravel().tolist())
    with atomic_write(path) as file:
        file.write(blob.SerializeToString())


def channel_means(mean: NDArray[np.float32]) -> list[float]:
    """The mean of each channel, for `mean_value`."""
    return [float(value) for value in mean.mean((1, 2), dtype=np.float64)]


def _sum_of(source: RecordSource, shape: tuple[int, ...], numbers: range) -> tuple[Sum, int]:
    total = np.zeros(shape, np.float64)
    whole = np.zeros(shape, np.uint32)
    for image in _images(source, shape, numbers):
        if image.dtype == np.uint8:
            np.add(whole, image, out=whole)
        else:
            total += image
    return total + whole, len(numbers)


def _images(source: RecordSource, shape: tuple[int, ...], numbers: range) -> Iterator[Values]:
    for number in numbers:
        image = _image(source, number)
        if image.shape != shape:
            raise DataError(
                f"{source.description}: {source.record_name(number)} is {_format(image.shape)}, but the first is "
                f"{_format(shape)}; a mean needs images of one size: convert them with --resize_height and "
                "--resize_width"
            )
        yield image


def _image(source: RecordSource, number: int) -> Values:
    """An image as it was stored: an encoded one with the channels that its file has."""
    try:
        datum, data = parse_datum(source.read(number))
        if datum.encoded:
            return decode_image(data)
        if len(data):
            return np.frombuffer(data, np.uint8).reshape(datum_shape(datum, len(data), "bytes"))
        values = np.array(datum.float_data, np.float32)
        return values.reshape(datum_shape(datum, values.size, "floats"))
    except DataError as error:
        if str(error).startswith(source.description):  # not of this record alone
            raise
        raise DataError(f"{source.description}: {source.record_name(number)} {error}") from error


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
