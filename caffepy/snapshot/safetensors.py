"""The .safetensors format of weights: a JSON header with names, types and places, and the values behind it.

A parameter is called LAYER.INDEX: `conv1.0` is the first parameter of the layer `conv1`. caffemodel.py imports this
module for weights, cli for the parameters of PyTorch modules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, SnapshotError
from caffepy.files import atomic_write, read_input
from caffepy.layers.core.base import Layer
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter
from caffepy.snapshot.binary import WRITE_FAILURE_NOTE, to_blob_proto

SUFFIX = ".safetensors"
MAX_FILE_BYTES = 1 << 40
MAX_HEADER_BYTES = 1 << 24
"""Maximum size of the header."""
_INDICES = frozenset(map(str, range(100)))
"""Of a layer's parameters."""

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_WRITTEN = {"<f4": "F32", "<f2": "F16"}
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class _Entry:
    """A tensor in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


# -- writing -------------------------------------------------------------------------------------------


def write_safetensors(path: Path, layers: Sequence[Layer]) -> None:
    """Write the parameters of a net's layers as float32; a shared parameter is stored with every layer that uses it.

    Raises:
        RunError: two layers with parameters have the same name, or the file cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for layer in layers:
        for index, blob in enumerate(layer.blobs):
            key = f"{layer.name}.{index}"
            if key in tensors:
                raise RunError(
                    f"two layers named '{layer.name}' have parameters, which .safetensors cannot store; rename one of "
                    "them, or write a .caffemodel"
                )
            tensors[key] = np.asarray(blob.host_data(), np.float32)
    write_tensors(path, tensors)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays of float32 and float16 by name.

    Raises:
        RunError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _WRITTEN[array.dtype.newbyteorder("<").str],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with atomic_write(path, WRITE_FAILURE_NOTE) as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).data.cast("B"))


# -- reading -------------------------------------------------------------------------------------------


def read_safetensors(path: Path, only_shapes: bool = False) -> NetParameter:
    """Return layers with their names and parameters, converted to float32.

    Args:
        path: the file.
        only_shapes: whether to leave the values out.

    Raises:
        SnapshotError: the file is absent or damaged, or a tensor's name is not LAYER.INDEX or its type not a float's.
    """
    layers: dict[str, dict[int, BlobProto]] = {}
    for name, array in read_tensors(path).items():
        layer, _, index = name.rpartition(".")
        if not layer or index not in _INDICES:
            raise SnapshotError(
                f"{path}: the tensor '{name}' is not a parameter of a Caffe layer, which is called LAYER.INDEX, such "
                "as conv1.0; write the file by caffepy export or net.save"
            )
        shape = BlobProto(shape=BlobShape(dim=array.shape))
        layers.setdefault(layer, {})[int(index)] = shape if only_shapes else to_blob_proto(_as_float32(array))
    result = NetParameter()
    for name, blobs in layers.items():
        result.layer.add(name=name).blobs.extend(blobs.get(index, BlobProto()) for index in range(max(blobs) + 1))
    return result


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name: float64, float32 or float16 arrays, and bfloat16 as uint16.

    Raises:
        SnapshotError: the file is absent or damaged, or a type is none of these.
    """
    content = read_input(path, "file", SnapshotError, MAX_FILE_BYTES, f"more than {MAX_FILE_BYTES} bytes")
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or start > len(content):
        raise _damaged(path, f"its header would have {length} bytes, the file has {len(content)}")
    try:
        header = json.loads(content[_LENGTH_BYTES:start])
        header.pop("__metadata__", None)
        entries = sorted((_entry(name, fields) for name, fields in header.items()), key=lambda entry: entry.begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is wrong: {error}") from error
    ends = [0, *(entry.end for entry in entries)]
    if [entry.begin for entry in entries] != ends[:-1] or start + ends[-1] != len(content):
        raise _damaged(path, f"its header describes other values than the {len(content) - start} bytes behind it")
    values = memoryview(content)[start:]
    return {
        entry.name: np.frombuffer(values[entry.begin : entry.end], _TYPES[entry.dtype]).reshape(entry.shape)
        for entry in entries
    }


def _entry(name: str, fields: Any) -> _Entry:
    shape, offsets = (tuple(fields[key]) for key in ("shape", "data_offsets"))
    begin, end = offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"'{name}' has the shape {shape} and the place {offsets}")
    if fields["dtype"] not in _TYPES:
        raise ValueError(f"'{name}' has the type {fields['dtype']}; {', '.join(_TYPES)} are read")
    if math.prod(shape) * np.dtype(_TYPES[fields["dtype"]]).itemsize != end - begin:
        raise ValueError(f"'{name}' has the shape {shape}, but {end - begin} bytes of {fields['dtype']}")
    return _Entry(name, fields["dtype"], shape, begin, end)


def _as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:  # bfloat16, the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _damaged(path: Path, what: str) -> SnapshotError:
    return SnapshotError(f"{path}: is damaged or not a {SUFFIX} file: {what}")
