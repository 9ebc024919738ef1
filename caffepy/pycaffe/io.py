"""Conversion of records (pycaffe's `io.py`); also exports the image functions of `caffepy.infer`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import decode_image
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import BlobProto, Datum
from caffepy.infer.images import ArrayError as ArrayError
from caffepy.infer.images import Transformer as Transformer
from caffepy.infer.images import load_image as load_image
from caffepy.infer.images import oversample as oversample
from caffepy.infer.images import resize_image as resize_image

Floats = NDArray[Any]

_RAW_TYPES = {caffe_pb2.FLOAT: "<f4", caffe_pb2.DOUBLE: "<f8", caffe_pb2.FLOAT16: "<f2"}


def blobproto_to_array(blob: BlobProto, return_diff: bool = False) -> Floats:
    """Return a BlobProto's data or diff in its shape; the legacy four dimensions take precedence over `shape`.

    Raises:
        ArrayError: the shape does not match the number of elements.
    """
    values = _blob_values(blob, "diff" if return_diff else "data")
    old = ("num", "channels", "height", "width")
    if any(blob.HasField(name) for name in old):
        shape = tuple(getattr(blob, name) for name in old)
    else:
        shape = tuple(blob.shape.dim)
    if math.prod(shape) != values.size or any(size < 0 for size in shape):
        raise ArrayError(f"the BlobProto has {values.size} elements and the shape {shape}, which do not fit")
    return values.reshape(shape)


def _blob_values(blob: BlobProto, what: str) -> Floats:
    raw_type = getattr(blob, f"raw_{what}_type")
    if (raw := getattr(blob, f"raw_{what}")) and raw_type in _RAW_TYPES:
        dtype = np.dtype(_RAW_TYPES[raw_type])
        if len(raw) % dtype.itemsize:
            raise ArrayError(f"the BlobProto's raw_{what} has {len(raw)} bytes, no whole number of {dtype.name}")
        return np.frombuffer(raw, dtype).astype(float)
    return np.array(getattr(blob, f"double_{what}") or getattr(blob, what), dtype=float)


def array_to_blobproto(arr: Floats, diff: Floats | None = None) -> BlobProto:
    """Return a BlobProto of an array; `diff` must have the same shape.

    Raises:
        ArrayError: the shapes differ.
    """
    blob = BlobProto(data=np.asarray(arr, dtype=float).ravel())
    blob.shape.dim.extend(np.shape(arr))
    if diff is not None:
        if np.shape(diff) != np.shape(arr):
            raise ArrayError(f"data has the shape {np.shape(arr)} and diff {np.shape(diff)}; they must be the same")
        blob.diff.extend(np.asarray(diff, dtype=float).ravel())
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[Floats]) -> bytes:
    """Serialise arrays as a BlobProtoVector."""
    return caffe_pb2.BlobProtoVector(blobs=[array_to_blobproto(array) for array in arraylist]).SerializeToString()


arraylist_to_blobprotovecor_str = arraylist_to_blobprotovector_str
"""NVIDIA Caffe's name."""


def blobprotovector_str_to_arraylist(str: bytes) -> list[Floats]:
    """Return the arrays of a serialised BlobProtoVector."""
    return [blobproto_to_array(blob) for blob in caffe_pb2.BlobProtoVector.FromString(str).blobs]


def array_to_datum(arr: Floats, label: int | None = None) -> Datum:
    """Return a Datum of a (C, H, W) array: bytes for uint8, else `float_data`.

    Raises:
        ArrayError: the array does not have three dimensions.
    """
    if arr.ndim != 3:
        raise ArrayError(f"Incorrect array shape. A Datum holds (C, H, W); this has the shape {arr.shape}")
    channels, height, width = arr.shape
    datum = Datum(channels=channels, height=height, width=width)
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(float).ravel())
    if label is not None:
        datum.label = int(label)
    return datum


def datum_to_array(datum: Datum) -> Floats:
    """Return a Datum's (C, H, W) array; encoded images are decoded in channel order BGR.

    Raises:
        ArrayError: the dimensions do not match the number of elements.
        DataError: the image cannot be decoded.
    """
    if datum.encoded:
        return decode_image(datum.data)
    shape = (datum.channels, datum.height, datum.width)
    values = np.frombuffer(datum.data, np.uint8).copy() if datum.data else np.array(datum.float_data, dtype=float)
    if math.prod(shape) != values.size or min(shape) < 0:
        raise ArrayError(f"the Datum has {values.size} elements and the shape {shape}, which do not fit")
    return values.reshape(shape)
