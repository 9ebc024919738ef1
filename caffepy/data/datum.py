"""Datums, the records of databases: parsing, checks and images (Caffe's `io.cpp`)."""

from __future__ import annotations

import math

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.errors import DataError
from caffepy.formats.messages import WireError, read_varint
from caffepy.formats.proto import caffe_pb2

VIEW_MIN_BYTES = 1 << 14
"""Records above this size are parsed without copying their `data`."""
_DATA_TAG = 0x22


def parse_datum(record: bytes | memoryview) -> tuple[caffe_pb2.Datum, bytes | memoryview]:
    """Parse a record; return the Datum and its `data`.

    For large records `data` is a view of the record and is not in the Datum: copying would dominate parsing.

    Raises:
        DataError: the record is not a Datum. The message follows a record's name.
    """
    try:
        if len(record) > VIEW_MIN_BYTES and (span := _find_data(record)) is not None:
            start, stop, following = span
            datum = caffe_pb2.Datum.FromString(bytes(record[:start]) + bytes(record[following:]))
            if not datum.data:
                return datum, memoryview(record)[stop:following]
        datum = caffe_pb2.Datum.FromString(record)  # type: ignore[arg-type]
    except (DecodeError, ValueError, WireError) as error:
        raise DataError(f"is not a Datum ({error}); rebuild the database with `caffepy convert_imageset`") from error
    return datum, datum.data


def _find_data(record: bytes | memoryview) -> tuple[int, int, int] | None:
    """Return the offsets of the field `data`, its first byte and its end; None if a non-varint field precedes it."""
    offset = 0
    while offset < len(record):
        tag = record[offset]
        if tag == _DATA_TAG:
            length, start = read_varint(record, offset + 1, len(record))
            return (offset, start, start + length) if start + length <= len(record) else None
        if tag & 7 or tag & 0x80:
            return None
        _, offset = read_varint(record, offset + 1, len(record))
    return None


def datum_shape(datum: caffe_pb2.Datum, values: int, kind: str) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of a Datum that is not encoded.

    Args:
        datum: the record.
        values: number of stored values.
        kind: "bytes" or "floats", for messages.

    Raises:
        DataError: the dimensions are not positive or do not fit the number of values.
    """
    shape = (datum.channels, datum.height, datum.width)
    if min(shape) <= 0 or math.prod(shape) != values:
        raise DataError(
            f"is a Datum of {values} {kind}, but its channels x height x width is "
            f"{shape[0]} x {shape[1]} x {shape[2]} = {math.prod(shape)}"
        )
    return shape


def stored_image(datum: caffe_pb2.Datum, data: bytes | memoryview) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Return the image (C, H, W) of a Datum that is not encoded, given its `data` as from `parse_datum`.

    Raises:
        DataError: as `datum_shape`.
    """
    if len(data):
        return np.frombuffer(data, np.uint8).reshape(datum_shape(datum, len(data), "bytes"))
    return np.array(datum.float_data, np.float32).reshape(datum_shape(datum, len(datum.float_data), "floats"))
