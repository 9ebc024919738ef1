"""Parameters to and from `BlobProto` and `NetParameter`, in the layouts that both Caffes write.

Owns the conversion between arrays and the wire: packed floats are copied as bytes, because protobuf's own lists cost a
Python object for each of a net's millions of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from caffepy.blob import Blob, format_shape
from caffepy.config.checksum import Part
from caffepy.config.load import blob_shape, check_blob, has_old_shape, stored_values
from caffepy.config.messages import field_head
from caffepy.errors import SnapshotError
from caffepy.proto import caffe_pb2

_DATA_TAG, _DIFF_TAG = 0x2A, 0x32
"""Tag bytes of BlobProto.data (5) and diff (6) as packed fields."""

_RAW_TYPES = {caffe_pb2.DOUBLE: "<f8", caffe_pb2.FLOAT: "<f4", caffe_pb2.FLOAT16: "<f2"}


def to_blob_proto(data: np.ndarray, diff: np.ndarray | None = None) -> caffe_pb2.BlobProto:
    """A BlobProto of a float32 array in logical order (and its derivatives), as BVLC Caffe writes it.

    That of an array without axes has no `shape`.
    """
    return caffe_pb2.BlobProto.FromString(b"".join(blob_parts(data, diff)))


def blob_parts(data: np.ndarray, diff: np.ndarray | None = None) -> list[Part]:
    """The bytes of `to_blob_proto`, in parts; float32 arrays in C order are not copied."""
    parts: list[Part] = []
    for tag, array in ((_DATA_TAG, data), (_DIFF_TAG, diff)):
        if array is not None and array.size:
            content = np.ascontiguousarray(array, "<f4").reshape(-1).data.cast("B")
            parts += [field_head(bytes([tag]), len(content)), content]
    shape = caffe_pb2.BlobShape(dim=data.shape) if data.shape else None
    return [*parts, caffe_pb2.BlobProto(shape=shape).SerializeToString()]


def from_blob_proto(blob: caffe_pb2.BlobProto, where: str, content: bytes = b"") -> np.ndarray:
    """The values of a BlobProto, float32 in its own shape; the array may be read-only.

    Takes `data`, `double_data` and NVIDIA's `raw_data`.

    Args:
        blob: with its values.
        where: for messages.
        content: the file in which they lie if `blob` has `data_end` (`config/stored_arrays.py`).

    Raises:
        SnapshotError: the number of values is not that of the shape.
    """
    check_values(blob, where)
    if blob.data_end:
        values = np.frombuffer(memoryview(content)[blob.data_begin : blob.data_end], "<f4").astype(
            np.float32, copy=False
        )
    elif blob.double_data:
        values = np.array(blob.double_data, np.float32)
    elif blob.raw_data:
        values = np.frombuffer(blob.raw_data, _RAW_TYPES[blob.raw_data_type]).astype(np.float32, copy=False)
    else:
        values = _packed_data(blob)
    return values.reshape(proto_shape(blob))


def check_values(blob: caffe_pb2.BlobProto, where: str) -> None:
    """Refuse a BlobProto that has not all the values that its shape needs, before any array is made of it.

    Raises:
        SnapshotError: so it is.
    """
    check_blob(blob, where)
    count, shape = stored_values(blob, where), proto_shape(blob)
    if count != math.prod(shape):
        raise SnapshotError(
            f"{where}: holds {count} values for shape {format_shape(shape)}; the file is damaged or incomplete"
        )


def proto_shape(blob: caffe_pb2.BlobProto) -> tuple[int, ...]:
    """The shape of a BlobProto; the old num, channels, height, width when it has these and no `shape`."""
    return blob_shape(blob)


def is_stored(blob: caffe_pb2.BlobProto) -> bool:
    """Whether a BlobProto has values; an empty one is a shared parameter, stored with its owner only."""
    return (
        bool(blob.data or blob.data_end or blob.double_data or blob.raw_data)
        or blob.HasField("shape")
        or has_old_shape(blob)
    )


def same_shape(blob: caffe_pb2.BlobProto, shape: tuple[int, ...]) -> bool:
    """Whether a BlobProto fits; an old four-number shape fits when it is `shape` with ones before it."""
    saved = proto_shape(blob)
    if not has_old_shape(blob):
        return saved == shape
    return len(shape) <= 4 and saved == (1,) * (4 - len(shape)) + shape


def load_blob(source: caffe_pb2.BlobProto, target: Blob, where: str, content: bytes = b"") -> None:
    """Copy the values of a BlobProto whose shape fits into a blob's data; `content` as for `from_blob_proto`."""
    values = from_blob_proto(source, where, content)
    target.load(values.reshape(target.shape))


def _packed_data(blob: caffe_pb2.BlobProto) -> np.ndarray:
    """The `data` of a BlobProto without a Python object for each number."""
    if len(blob.data) < 1024:
        return np.array(blob.data, np.float32)
    blob.DiscardUnknownFields()  # what is left are varints and length-delimited fields
    for tag, content in _length_delimited(blob.SerializeToString()):
        if tag == _DATA_TAG:
            return np.frombuffer(content, "<f4").astype(np.float32, copy=False)
    return np.array(blob.data, np.float32)


def _length_delimited(wire: bytes) -> Iterator[tuple[int, memoryview]]:
    """The length-delimited fields of a serialised BlobProto, (tag, content); varints are skipped."""
    view, offset = memoryview(wire), 0
    while offset < len(view):
        tag, offset = _read_varint(view, offset)
        number, offset = _read_varint(view, offset)
        if tag & 7 == 2:
            yield tag, view[offset : offset + number]
            offset += number


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = view[offset]
        number |= (byte & 127) << shift
        shift, offset = shift + 7, offset + 1
        if byte < 128:
            return number, offset
