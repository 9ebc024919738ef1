"""The .safetensors format of weights, by the package safetensors, which checks sizes before it reads values.

A parameter is called LAYER.INDEX: `conv1.0` is the first parameter of the layer `conv1`. caffemodel.py imports this
module for weights, cli for the parameters of PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from caffepy.errors import RunError, SnapshotError
from caffepy.formats.binary import WRITE_FAILURE_NOTE, to_blob_proto
from caffepy.formats.blobs import StoredLayer
from caffepy.formats.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter
from caffepy.utils.files import atomic_write, read_input

SUFFIX = ".safetensors"
MAX_FILE_BYTES = 1 << 40
_INDICES = frozenset(map(str, range(100)))
"""Of a layer's parameters."""

_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


# -- writing -------------------------------------------------------------------------------------------


def write_safetensors(path: Path, layers: Sequence[StoredLayer]) -> None:
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
    """Write arrays of float32 and float16 by name. The package's own `save_file` would replace a device, too.

    Raises:
        RunError: the file cannot be written.
    """
    content = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
    with atomic_write(path, WRITE_FAILURE_NOTE) as file:
        file.write(content)


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
    """Return the tensors of a file, sorted by name: float64, float32 or float16 arrays, and bfloat16 as uint16.

    Raises:
        SnapshotError: the file is absent or damaged, or a type is none of these.
    """
    content = read_input(path, "file", SnapshotError, MAX_FILE_BYTES, f"more than {MAX_FILE_BYTES} bytes")
    try:
        return {
            name: np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in sorted(deserialize(content), key=lambda each: each[0])  # type: ignore[no-untyped-call]
        }
    except KeyError as error:
        raise SnapshotError(f"{path}: a tensor has the type {error}; {', '.join(_TYPES)} are read") from error
    except (SafetensorError, ValueError) as error:
        raise SnapshotError(f"{path}: is damaged or not a {SUFFIX} file: {error}") from error


def _as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:  # bfloat16, the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)
