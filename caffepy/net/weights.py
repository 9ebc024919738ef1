"""Parameters to and from `BlobProto` and `NetParameter`, in the layouts that both Caffes write.

Owns the conversion between arrays and the wire: packed floats are copied as bytes, because protobuf's own lists cost a
Python object for each of a net's millions of weights.
"""

from __future__ import annotations

import math

import numpy as np

from caffepy.blob import Blob, format_shape
from caffepy.config.load import blob_shape, check_blob, has_old_shape, stored_values
from caffepy.config.messages import Part, delimited, wire_fields
from caffepy.errors import SnapshotError
from caffepy.proto import caffe_pb2

_DATA, _DIFF = caffe_pb2.BlobProto.DATA_FIELD_NUMBER, caffe_pb2.BlobProto.DIFF_FIELD_NUMBER

_RAW_TYPES = {caffe_pb2.DOUBLE: "<f8", caffe_pb2.FLOAT: "<f4", caffe_pb2.FLOAT16: "<f2"}


def to_blob_proto(data: np.ndarray, diff: np.ndarray | None = None) -> caffe_pb2.BlobProto:
    """A BlobProto of a float32 array in logical order (and its derivatives), as BVLC Caffe writes it.

    That of an array without axes has no `shape`.
    """
    return caffe_pb2.BlobProto.FromString(b"".join(blob_parts(data, diff)))


def blob_parts(data: np.ndarray, diff: np.ndarray | None = None) -> list[Part]:
    """The bytes of `to_blob_proto`, in parts; float32 arrays in C order are not copied."""
    parts: list[Part] = []
    for number, array in ((_DATA, data), (_DIFF, diff)):
        if array is not None and array.size:
            parts += delimited(number, [np.ascontiguousarray(array, "<f4").reshape(-1).data.cast("B")])
    shape = caffe_pb2.BlobShape(dim=data.shape) if data.shape else None
    return [*parts, caffe_pb2.BlobProto(shape=shape).SerializeToString()]


def from_blob_proto(blob: caffe_pb2.BlobProto, where: str, content: bytes = b"") -> np.ndarray:
    """The values of a BlobProto, float32 in its own shape; the array may be read-only.

    Takes `data`, `double_data` and NVIDIA's `raw_data`.

    Args:
        blob: with its values.
        where: for messages.
        content: the file in which they lie if `blob` has `data_end` (`config/lazy_blobs.py`).

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
    blob.DiscardUnknownFields()  # a group among them would end the walk
    wire = memoryview(blob.SerializeToString())
    for each in wire_fields(wire, 0, len(wire)):
        if each.number == _DATA:
            return np.frombuffer(wire[each.begin : each.end], "<f4").astype(np.float32, copy=False)
    return np.array(blob.data, np.float32)
