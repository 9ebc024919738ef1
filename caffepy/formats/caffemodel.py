""".caffemodel files: reads and writes layers with parameters, and copies parameters into a net's layers by name.

A binary file contains the net with the layers' settings; an HDF5 file (`hdf5_snapshot.py`) and a .safetensors file
(`safetensors.py`) contain names and parameters of its layers. Formats: Caffe's `net.cpp`, ToProto, ToHDF5 and
CopyTrainedLayersFrom.

Caffe allows several layers of one name and copies the last one's parameters to the first. caffepy matches layers of one
name in order: the first to the first, the second to the second. Different numbers of layers of one name are an error.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from caffepy.errors import SnapshotError
from caffepy.formats.binary import (
    FieldTree,
    StoredMessage,
    blob_parts,
    check_blob,
    check_size,
    convert_errors,
    is_hdf5,
    matching_fields,
    read_message,
    to_blob_proto,
    with_checksum,
    write_parts,
)
from caffepy.formats.blobs import StoredBlob, StoredLayer
from caffepy.formats.messages import DELIMITED, VARINT, Part, WireError, encode_delimited
from caffepy.formats.proto.caffe_pb2 import (
    BlobProto,
    LayerParameter,
    NetParameter,
    RecurrentParameter,
    Type,
    V1LayerParameter,
)
from caffepy.formats.safetensors import SUFFIX, read_safetensors, write_safetensors
from caffepy.formats.upgrade import upgrade_net
from caffepy.utils.files import open_regular

log = logging.getLogger(__name__)
TrainedLayers: TypeAlias = StoredMessage[NetParameter]
"""Layers with their parameters: the result of `read_caffemodel`."""

MAX_OUTLINE_BYTES = 1 << 24
"""Maximum size of all names and shapes in a .caffemodel."""
_BLOBS, _LAYER = LayerParameter.BLOBS_FIELD_NUMBER, NetParameter.LAYER_FIELD_NUMBER


# -- reading -------------------------------------------------------------------------------------------


def read_caffemodel(path: Path | str, strict: bool = False) -> TrainedLayers:
    """Read a .safetensors file, or a .caffemodel of either format, Caffe and any version, as of the current schema.

    Large arrays of a binary file are not in the message. `crc32c` and `blob_count` are set if caffepy wrote the file.

    Args:
        path: the file.
        strict: refuse a file that was changed after caffepy wrote it, instead of logging a warning.

    Raises:
        SnapshotError: the file is absent, truncated, too large or not a .caffemodel, or a blob's number of values does
            not match its shape.
    """
    return _read(Path(path), inline_arrays=False, strict=strict)


def read_weights(path: Path | str) -> NetParameter:
    """Read a .caffemodel as `read_caffemodel`, with all arrays in the message.

    Raises:
        SnapshotError: as `read_caffemodel`.
    """
    return _read(Path(path), inline_arrays=True).message


def read_layer_shapes(path: Path) -> NetParameter:
    """Read layer names and blob shapes of a .caffemodel of either format or a .safetensors file, without the arrays.

    Raises:
        SnapshotError: the file is absent, truncated or not a .caffemodel.
    """
    with convert_errors(str(path)):
        if path.suffix == SUFFIX:
            return read_safetensors(path, only_shapes=True)
        if not is_hdf5(path):
            return _read_outline(path)
        from caffepy.formats.hdf5_snapshot import read_layer_shapes_hdf5

        return read_layer_shapes_hdf5(path)


def _read(path: Path, inline_arrays: bool, strict: bool = False) -> TrainedLayers:
    with convert_errors(str(path)):
        if path.suffix == SUFFIX:
            stored = StoredMessage(read_safetensors(path))
        elif is_hdf5(path):
            from caffepy.formats.hdf5_snapshot import read_caffemodel_hdf5

            stored = read_caffemodel_hdf5(path)
        else:
            stored = read_message(path, NetParameter, inline_arrays, weights_only=True)
            adopt_nvidia_fields(stored.message)
            upgrade_net(stored.message, str(path))
        for layer in stored.message.layer:
            for index, blob in enumerate(layer.blobs):
                check_blob(blob, f"{path}: layer '{layer.name}' blob {index}")
    stored.check_unchanged(str(path), strict)
    return stored


class _UnknownField(Protocol):
    """An unknown field of a message; protobuf's stubs lack this type."""

    field_number: int
    wire_type: int
    data: Any


_NVIDIA_TYPES = {145: "forward_type", 146: "backward_type", 147: "forward_math", 148: "backward_math"}
_NVIDIA_RECURRENT = 151


def adopt_nvidia_fields(param: NetParameter) -> bool:
    """Move fields that NVIDIA Caffe numbers differently from BVLC Caffe to their place in our schema.

    ===== ============================ ==========================
    field NVIDIA Caffe                 BVLC Caffe and our schema
    ===== ============================ ==========================
    145   forward_type (an enum)       parameter_param (a message)
    146   backward_type (an enum)      recurrent_param (a message)
    147   forward_math (an enum)       swish_param (a message)
    148   backward_math (an enum)      clip_param (a message)
    151   recurrent_param (a message)  unused
    ===== ============================ ==========================

    Enums and messages differ in wire type, so protobuf keeps NVIDIA's fields as unknown fields. Prototxt files use
    names and are not affected.
    """
    adopted = [_move_nvidia_fields(layer) for layer in param.layer]
    return any(adopted)


def _move_nvidia_fields(layer: LayerParameter) -> bool:
    adopted = False
    for field in cast("Iterable[_UnknownField]", UnknownFieldSet(layer)):
        if field.field_number in _NVIDIA_TYPES and field.wire_type == VARINT and field.data in Type.values():
            setattr(layer, _NVIDIA_TYPES[field.field_number], field.data)
            adopted = True
        elif field.field_number == _NVIDIA_RECURRENT and field.wire_type == DELIMITED:
            recurrent = RecurrentParameter()
            with suppress(DecodeError):  # a fork's message of the same number
                recurrent.MergeFromString(field.data)
                layer.recurrent_param.MergeFrom(recurrent)
                adopted = True
    if adopted:
        layer.DiscardUnknownFields()
    return adopted


# -- names and shapes only ------------------------------------------------------------------------------


_SHAPE: FieldTree = {
    field.number: {}
    for name, field in BlobProto.DESCRIPTOR.fields_by_name.items()
    if name in ("shape", "num", "channels", "height", "width")
}
_OUTLINE: FieldTree = {
    NetParameter.LAYER_FIELD_NUMBER: {
        LayerParameter.NAME_FIELD_NUMBER: {},
        LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
    NetParameter.LAYERS_FIELD_NUMBER: {
        V1LayerParameter.NAME_FIELD_NUMBER: {},
        V1LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
}
"""Fields with layer names and blob shapes."""


def _read_outline(path: Path) -> NetParameter:
    """Read layer names and blob shapes of a binary .caffemodel; skip the arrays."""
    param = NetParameter()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            parts = list(_outline_parts(_FileBytes(file), 0, size, _OUTLINE, itertools.count()))
        except WireError:
            parts = []
    param.MergeFromString(b"".join(parts))
    param.layer.extend(LayerParameter(name=layer.name, blobs=layer.blobs) for layer in param.layers)
    if not param.layer:
        raise SnapshotError(f"{path}: is truncated or not a .caffemodel")
    return param


class _FileBytes:
    """A file's bytes by index, read through its buffer, and up to `MAX_OUTLINE_BYTES` bytes in ranges."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes_read = 0

    def __getitem__(self, at: int, /) -> int:
        self._file.seek(at)
        return self._file.read(1)[0]

    def read_range(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end)."""
        self._bytes_read += end - begin
        if self._bytes_read > MAX_OUTLINE_BYTES:
            raise WireError
        self._file.seek(begin)
        return self._file.read(end - begin)


def _outline_parts(view: _FileBytes, begin: int, end: int, tree: FieldTree, count: Iterator[int]) -> Iterator[Part]:
    """Yield the parts of a message with only the fields in `tree`; leaves of the tree are copied entirely."""
    for each, subtree in matching_fields(view, begin, end, tree, count):
        if not subtree:
            yield view.read_range(each.start, each.end)
        elif each.kind != DELIMITED:
            raise WireError
        else:
            yield from encode_delimited(each.number, list(_outline_parts(view, each.begin, each.end, subtree, count)))


# -- writing -------------------------------------------------------------------------------------------


def write_caffemodel(path: Path, name: str, layers: Sequence[StoredLayer], write_diff: bool = False) -> None:
    """Write a net's name and parameters: HDF5 if the path ends in .h5, .safetensors if it ends so, else binary.

    Args:
        path: the file.
        name: the net's name.
        layers: the net's layers. The binary format stores a shared parameter with every layer that uses it.
        write_diff: also store gradients; not in .safetensors.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix == SUFFIX:
        write_safetensors(path, layers)
        return
    if path.suffix != ".h5":
        write_binary(path, name, layers, write_diff)
        return
    from caffepy.formats.hdf5_snapshot import write_caffemodel_hdf5

    write_caffemodel_hdf5(path, layers, write_diff)


def write_binary(path: Path, name: str, layers: Sequence[StoredLayer], write_diff: bool = False) -> None:
    """Write the binary format for any path; otherwise as `write_caffemodel`."""
    parts = _net_parts(name, layers, _arrays(write_diff))
    write_parts(path, with_checksum(NetParameter, _blob_count(layers), parts))


def check_caffemodel_size(path: Path, name: str, layers: Sequence[StoredLayer], write_diff: bool) -> None:
    """Check that a net's binary .caffemodel does not exceed protobuf's limit; arguments as `write_caffemodel`.

    Raises:
        ConfigError: the file would be too large.
    """
    ends = with_checksum(NetParameter, _blob_count(layers), [])
    check_size(path, sum(map(len, itertools.chain(ends, _net_parts(name, layers, _zeros(write_diff))))))


def layer_protos(layers: Sequence[StoredLayer], write_diff: bool) -> Iterator[LayerParameter]:
    """Yield each layer's LayerParameter with its parameters (and gradients), as in binary files.

    Cast layers are omitted: the net inserts them for dtypes, and no prototxt has them.
    """
    for layer in _saved_layers(layers):
        saved = _settings(layer)
        saved.blobs.extend(to_blob_proto(*arrays) for arrays in map(_arrays(write_diff), layer.blobs))
        yield saved


_ArrayGetter: TypeAlias = Callable[[StoredBlob], "tuple[np.ndarray, np.ndarray | None]"]
"""Returns a blob's values and gradients in host memory."""


def _arrays(write_diff: bool) -> _ArrayGetter:
    return lambda blob: (blob.host_data(), blob.host_diff() if write_diff else None)


def _zeros(write_diff: bool) -> _ArrayGetter:
    """Return zeros of the blobs' shapes, for counting bytes; untouched pages use no memory."""

    def zeros_of(blob: StoredBlob) -> tuple[np.ndarray, np.ndarray | None]:
        zeros = np.zeros(blob.shape, np.float32)
        return zeros, zeros if write_diff else None

    return zeros_of


def _blob_count(layers: Sequence[StoredLayer]) -> int:
    return sum(len(layer.blobs) for layer in layers)


def _net_parts(name: str, layers: Sequence[StoredLayer], get_arrays: _ArrayGetter) -> Iterator[Part]:
    """Yield the parts of a NetParameter in protobuf's field order, without copying arrays."""
    yield NetParameter(name=name).SerializeToString()
    for layer in _saved_layers(layers):
        before, after = _settings(layer), _settings(layer)
        for field in LayerParameter.DESCRIPTOR.fields:
            (after if field.number < _BLOBS else before).ClearField(field.name)
        parts: list[Part] = [before.SerializeToString()]
        for blob in layer.blobs:
            parts += encode_delimited(_BLOBS, blob_parts(*get_arrays(blob)))
        parts.append(after.SerializeToString())
        yield from encode_delimited(_LAYER, parts)


def _saved_layers(layers: Sequence[StoredLayer]) -> Iterator[StoredLayer]:
    return (layer for layer in layers if layer.type != "Cast")


def _settings(layer: StoredLayer) -> LayerParameter:
    """Return the LayerParameter to store, without parameters."""
    saved = LayerParameter()
    saved.CopyFrom(layer.param)
    del saved.blobs[:]
    if not saved.loss_weight and any(layer.loss_weights):
        saved.loss_weight.extend(layer.loss_weights)
    return saved
