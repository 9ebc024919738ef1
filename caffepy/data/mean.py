"""Mean images: their files, BlobProtos as Caffe's `compute_image_mean.cpp` writes them, and a database's mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.data.datum import parse_datum, stored_image
from caffepy.data.images import decode_image, sides
from caffepy.data.sources.databases import LevelDbSource, LmdbSource, RecordSource, is_leveldb
from caffepy.data.workers import Progress, ordered_map
from caffepy.errors import DataError
from caffepy.formats.messages import DELIMITED, VARINT, WireError, describe_content, read_varint, wire_fields
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import atomic_write, read_data

# -- files ---------------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 30
_RAW_TYPES = {caffe_pb2.FLOAT: "<f4", caffe_pb2.DOUBLE: "<f8", caffe_pb2.FLOAT16: "<f2"}


def read_mean(path: Path) -> NDArray[np.float32]:
    """Read a mean image: (C, H, W).

    Raises:
        DataError: the file cannot be read or is not a BlobProto of one image.
    """
    blob = _read_proto(path, "mean_file")
    shape = tuple(blob.shape.dim) if blob.HasField("shape") else (blob.num, blob.channels, blob.height, blob.width)
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return _shaped(path, _values(blob, f"mean_file '{path}'"), shape, (3,))


def _shaped(
    path: Path, values: NDArray[np.float32], shape: tuple[int, ...], axes: tuple[int, ...]
) -> NDArray[np.float32]:
    """Return the values in their shape, which must have one of these numbers of axes."""
    if len(shape) not in axes or min(shape) <= 0 or math.prod(shape) != values.size:
        clips = ", or one clip of channels x frames x height x width" if 4 in axes else ""
        raise DataError(
            f"mean_file '{path}' holds {values.size} values in the shape {sides(shape)}; a mean is one image of "
            f"channels x height x width{clips}"
        )
    return values.reshape(shape).astype(np.float32, copy=False)


def read_blob(path: Path, field: str) -> NDArray[np.float32]:
    """Read the elements of a BlobProto file: 1-D.

    Args:
        path: the file.
        field: the field that names the file, for messages.

    Raises:
        DataError: the file cannot be read or is not a BlobProto.
    """
    return _values(_read_proto(path, field), f"{field} '{path}'")


def _read_proto(path: Path, field: str) -> caffe_pb2.BlobProto:
    content = read_data(path, _MAX_BYTES, f"{field} '{path}'")
    try:
        return caffe_pb2.BlobProto.FromString(content)
    except DecodeError as error:
        raise DataError(
            f"{field} '{path}' is not a BlobProto (`caffepy compute_image_mean` writes one): "
            f"{describe_content(content)}"
        ) from error


def _values(blob: caffe_pb2.BlobProto, where: str) -> NDArray[np.float32]:
    if blob.double_data:
        with np.errstate(over="ignore"):
            return np.array(blob.double_data, np.float64).astype(np.float32)
    if blob.raw_data and blob.raw_data_type in _RAW_TYPES:
        dtype = np.dtype(_RAW_TYPES[blob.raw_data_type])
        if len(blob.raw_data) % dtype.itemsize:
            raise DataError(
                f"{where} has {len(blob.raw_data)} bytes of raw_data, not a multiple of "
                f"{dtype.itemsize}; the file is damaged"
            )
        with np.errstate(over="ignore"):
            return np.frombuffer(blob.raw_data, dtype).astype(np.float32)
    return np.array(blob.data, np.float32)


_C3D_FIELDS = ("num", "channels", "height", "width")
"""BlobProto's first fields; that of C3D 1.0 has `length` third, which moves those after it."""


def read_volume_mean(path: Path) -> NDArray[np.float32]:
    """Read the mean of images (C, H, W) or clips (C, L, H, W).

    A file of C3D 1.0 has a BlobProto of its own, whose fields from 3 on are length, height, width and data. There field
    5 is a number and field 6 the values; in Caffe's, field 5 is the values.

    Raises:
        DataError: the file cannot be read or is not a BlobProto of one image or clip.
    """
    blob, content = caffe_pb2.BlobProto(), read_data(path, _MAX_BYTES, f"mean_file '{path}'")
    try:
        fields = list(wire_fields(content, 0, len(content)))
    except WireError:
        fields = []
    if any(field.number == blob.DATA_FIELD_NUMBER and field.kind == VARINT for field in fields):
        numbers = {field.number: content[field.begin : field.end] for field in fields if field.kind == VARINT}
        shape: tuple[int, ...] = tuple(
            read_varint(number, 0, len(number))[0] for number in (numbers.get(i, b"\0") for i in range(1, 6))
        )
        values = np.concatenate(
            [np.frombuffer(content[f.begin : f.end], "<f4") for f in fields if f.number == 6 and f.kind == DELIMITED]
            or [np.empty(0, np.float32)]
        )
    else:
        blob = _read_proto(path, "mean_file")
        shape = tuple(blob.shape.dim) if blob.HasField("shape") else tuple(getattr(blob, name) for name in _C3D_FIELDS)
        values = _values(blob, f"mean_file '{path}'")
    if len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    return _shaped(path, values, shape, (3, 4))


# -- a database's mean ---------------------------------------------------------------------------------

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
                f"{source.description}: {source.record_name(number)} is {sides(image.shape)}, but the first is "
                f"{sides(shape)}; a mean needs images of equal size: convert them with --resize_height and "
                "--resize_width"
            )
        yield image


def _image(source: RecordSource, number: int) -> Values:
    """Return the image of a record; an encoded image keeps its channels."""
    try:
        datum, data = parse_datum(source.read(number))
        return decode_image(data) if datum.encoded else stored_image(datum, data)
    except DataError as error:
        if str(error).startswith(source.description):  # an error of the whole database
            raise
        raise DataError(f"{source.description}: {source.record_name(number)} {error}") from error
