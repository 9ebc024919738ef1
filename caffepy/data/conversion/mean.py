"""Computation of a database's mean image, as Caffe's `compute_image_mean.cpp`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.cpus import cpu_count
from caffepy.data.conversion.ordered_map import Progress, ordered_map
from caffepy.data.datum import datum_shape, decode_image, parse_datum
from caffepy.data.sources.leveldb import LevelDbSource, is_leveldb
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.source import RecordSource
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import atomic_write

_TASK_RECORDS = 64
"""Records per task."""

Total = NDArray[np.float64]
Values = NDArray[np.uint8] | NDArray[np.float32]


def open_source(path: Path, backend: str) -> RecordSource:
    """Open a database. The files decide between LMDB and LevelDB where they contradict `backend`, as in data layers.

    Raises:
        DataError: the database cannot be read.
    """
    leveldb = is_leveldb(path) or (backend == "leveldb" and not (path / "data.mdb").exists())
    return LevelDbSource(path) if leveldb else LmdbSource(path)


def compute_mean(
    path: Path, backend: str = "lmdb", threads: int | None = None, progress: Progress | None = None
) -> NDArray[np.float32]:
    """Compute the mean image of a database: (C, H, W).

    Sums of uint8 images are exact; Caffe rounds to float32 at each image.

    Args:
        path: the database.
        backend: lmdb or leveldb.
        threads: threads that read and decode; None: one per core.
        progress: reports the progress.

    Raises:
        DataError: the database cannot be read, or its images differ in size.
    """
    source, progress = open_source(path, backend), progress or Progress()
    try:
        count = progress.total = len(source)
        threads = threads or cpu_count()
        if not source.allows_concurrent_reads(count):
            threads = 1
        shape = _image(source, 0).shape
        total = np.zeros(shape, np.float64)
        batches = (range(first, min(first + _TASK_RECORDS, count)) for first in range(0, count, _TASK_RECORDS))
        for partial_total, count_done in ordered_map(partial(_sum_images, source, shape), batches, threads):
            total += partial_total
            progress.advance(count_done)
    finally:
        source.close()
    progress.finish(count)
    return (total / count).astype(np.float32)


def write_mean(path: Path, mean: NDArray[np.float32]) -> None:
    """Write a mean image as a BlobProto for `mean_file`.

    Raises:
        RunError: writing failed.
    """
    channels, height, width = mean.shape
    blob = caffe_pb2.BlobProto(num=1, channels=channels, height=height, width=width, data=mean.ravel().tolist())
    with atomic_write(path) as file:
        file.write(blob.SerializeToString())


def channel_means(mean: NDArray[np.float32]) -> list[float]:
    """Return the mean of each channel, for `mean_value`."""
    return [float(value) for value in mean.mean((1, 2), dtype=np.float64)]


def _sum_images(source: RecordSource, shape: tuple[int, ...], numbers: range) -> tuple[Total, int]:
    total = np.zeros(shape, np.float64)
    byte_total = np.zeros(shape, np.uint32)
    for image in _images(source, shape, numbers):
        if image.dtype == np.uint8:
            np.add(byte_total, image, out=byte_total)
        else:
            total += image
    return total + byte_total, len(numbers)


def _images(source: RecordSource, shape: tuple[int, ...], numbers: range) -> Iterator[Values]:
    for number in numbers:
        image = _image(source, number)
        if image.shape != shape:
            raise DataError(
                f"{source.description}: {source.record_name(number)} is {_format(image.shape)}, but the first is "
                f"{_format(shape)}; a mean needs images of equal size: convert them with --resize_height and "
                "--resize_width"
            )
        yield image


def _image(source: RecordSource, number: int) -> Values:
    """Return the image of a record; an encoded image keeps its channels."""
    try:
        datum, data = parse_datum(source.read(number))
        if datum.encoded:
            return decode_image(data)
        if len(data):
            return np.frombuffer(data, np.uint8).reshape(datum_shape(datum, len(data), "bytes"))
        values = np.array(datum.float_data, np.float32)
        return values.reshape(datum_shape(datum, values.size, "floats"))
    except DataError as error:
        if str(error).startswith(source.description):  # an error of the whole database
            raise
        raise DataError(f"{source.description}: {source.record_name(number)} {error}") from error


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
