""".caffemodel: layers with their parameters, read, copied into a net's layers of the same name, and written.

A binary file holds the whole net with the layers' settings, an HDF5 file (`hdf5.py`) names and parameters of its
layers. Formats: Caffe's `net.cpp`, ToProto, ToHDF5 and CopyTrainedLayersFrom.

Caffe lets layers have the same name and takes the last one's parameters for the first; here the first of a name gets
the first one's, the second the second one's. If the two sides have different numbers of them, nothing says which belong
together, and it is an error.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from caffepy.blob import Blob, format_shape
from caffepy.config.messages import DELIMITED, VARINT, Part, WireError, encode_delimited
from caffepy.config.upgrade import upgrade_net
from caffepy.errors import ConfigError, SnapshotError
from caffepy.files import open_regular
from caffepy.layers.core.base import Layer
from caffepy.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter, Type, V1LayerParameter
from caffepy.snapshot.binary import (
    Stored,
    Within,
    blob_parts,
    blob_shape,
    check_blob,
    check_size,
    check_values,
    checksummed,
    fields_within,
    from_blob_proto,
    is_hdf5,
    is_stored,
    read_message,
    refusing_damage,
    same_shape,
    to_blob_proto,
    write_parts,
)

log = logging.getLogger(__name__)
Named = TypeVar("Named", Layer, LayerParameter)
TrainedLayers: TypeAlias = Stored[NetParameter]
"""Layers with their parameters, as `read_caffemodel` returns them."""

MAX_OUTLINE_BYTES = 1 << 24
"""Of all names and shapes of a .caffemodel."""
_BLOBS, _LAYER = LayerParameter.BLOBS_FIELD_NUMBER, NetParameter.LAYER_FIELD_NUMBER


# -- reading -------------------------------------------------------------------------------------------


def read_caffemodel(path: Path | str) -> TrainedLayers:
    """The layers in a .caffemodel of either format, of either Caffe and any age, upgraded to the current schema.

    The large arrays of a binary file are not in the message. Files that caffepy wrote have `crc32c` and `blob_count`.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or not a .caffemodel; the message says
            what it looks like. Also when a blob does not hold as many values as its shape says.
    """
    return _read(Path(path), whole=False)


def read_weights(path: Path | str) -> NetParameter:
    """The net in a .caffemodel, as `read_caffemodel`, with all arrays in the message.

    Raises:
        SnapshotError: as `read_caffemodel`.
    """
    return _read(Path(path), whole=True).message


def read_layer_shapes(path: Path) -> NetParameter:
    """The layers in a .caffemodel of either format with names and shapes of blobs alone; arrays are not read.

    Raises:
        SnapshotError: the file is absent, truncated or not a .caffemodel.
    """
    with refusing_damage(str(path)):
        if not is_hdf5(path):
            return _read_outline(path)
        from caffepy.snapshot.hdf5 import read_layer_shapes_hdf5

        return read_layer_shapes_hdf5(path)


def _read(path: Path, whole: bool) -> TrainedLayers:
    with refusing_damage(str(path)):
        if is_hdf5(path):
            from caffepy.snapshot.hdf5 import read_caffemodel_hdf5

            stored = Stored(read_caffemodel_hdf5(path))
        else:
            stored = read_message(path, NetParameter, whole)
            adopt_nvidia_fields(stored.message)
            upgrade_net(stored.message, str(path))
        for layer in stored.message.layer:
            for index, blob in enumerate(layer.blobs):
                check_blob(blob, f"{path}: layer '{layer.name}' blob {index}")
    return stored


class _UnknownField(Protocol):
    """What protobuf keeps of a field that the schema does not have; its stubs do not say so."""

    field_number: int
    wire_type: int
    data: Any


_NVIDIA_TYPES = {145: "forward_type", 146: "backward_type", 147: "forward_math", 148: "backward_math"}
_NVIDIA_RECURRENT = 151


def adopt_nvidia_fields(param: NetParameter) -> bool:
    """Move the fields of a binary net of NVIDIA Caffe that BVLC Caffe numbers otherwise to where our schema has them.

    ===== ============================ ==========================
    field NVIDIA Caffe                 BVLC Caffe and our schema
    ===== ============================ ==========================
    145   forward_type (an enum)       parameter_param (a message)
    146   backward_type (an enum)      recurrent_param (a message)
    147   forward_math (an enum)       swish_param (a message)
    148   backward_math (an enum)      clip_param (a message)
    151   recurrent_param (a message)  unused
    ===== ============================ ==========================

    An enum and a message differ in their wire type, so protobuf leaves NVIDIA's among the unknown fields. A prototxt
    has names.

    Returns:
        Whether there were any.
    """
    adopted = [_adopt(layer) for layer in param.layer]
    return any(adopted)


def _adopt(layer: LayerParameter) -> bool:
    adopted = False
    for field in cast("Iterable[_UnknownField]", UnknownFieldSet(layer)):
        if field.field_number in _NVIDIA_TYPES and field.wire_type == VARINT and field.data in Type.values():
            setattr(layer, _NVIDIA_TYPES[field.field_number], field.data)
            adopted = True
        elif field.field_number == _NVIDIA_RECURRENT and field.wire_type == DELIMITED:
            layer.recurrent_param.MergeFromString(field.data)
            adopted = True
    if adopted:
        layer.DiscardUnknownFields()
    return adopted


# -- names and shapes alone ----------------------------------------------------------------------------


_SHAPE: Within = {
    field.number: {}
    for name, field in BlobProto.DESCRIPTOR.fields_by_name.items()
    if name in ("shape", "num", "channels", "height", "width")
}
_OUTLINE: Within = {
    NetParameter.LAYER_FIELD_NUMBER: {
        LayerParameter.NAME_FIELD_NUMBER: {},
        LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
    NetParameter.LAYERS_FIELD_NUMBER: {
        V1LayerParameter.NAME_FIELD_NUMBER: {},
        V1LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
}
"""Fields that say of which net a .caffemodel is."""


def _read_outline(path: Path) -> NetParameter:
    """The layers in a binary .caffemodel with names and shapes of blobs; arrays are passed over, not read.

    Raises:
        SnapshotError: these are no fields, or more names and shapes than any net has.
        IndexError, google.protobuf.message.DecodeError: the file is damaged.
    """
    param = NetParameter()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            parts = list(_outline(_FileBytes(file), 0, size, _OUTLINE, itertools.count()))
        except WireError:
            parts = []
    param.MergeFromString(b"".join(parts))
    param.layer.extend(LayerParameter(name=layer.name, blobs=layer.blobs) for layer in param.layers)
    if not param.layer:
        raise SnapshotError(f"{path}: is truncated or not a .caffemodel")
    return param


class _FileBytes:
    """A file's bytes, read one by one through its buffer, and `MAX_OUTLINE_BYTES` of them at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._taken = 0

    def __getitem__(self, at: int, /) -> int:
        self._file.seek(at)
        return self._file.read(1)[0]

    def part(self, begin: int, end: int) -> bytes:
        """Some of them at once."""
        self._taken += end - begin
        if self._taken > MAX_OUTLINE_BYTES:
            raise WireError
        self._file.seek(begin)
        return self._file.read(end - begin)


def _outline(view: _FileBytes, begin: int, end: int, within: Within, count: Iterator[int]) -> Iterator[Part]:
    """The bytes of a message with the fields of `within` alone; those that enter no further are taken whole."""
    for each, entered in fields_within(view, begin, end, within, count):
        if not entered:
            yield view.part(each.start, each.end)
        elif each.kind != DELIMITED:
            raise WireError
        else:
            yield from encode_delimited(each.number, list(_outline(view, each.begin, each.end, entered, count)))


# -- into a net's layers -------------------------------------------------------------------------------


def copy_trained_layers(
    layers: Sequence[Layer],
    weights: NetParameter | TrainedLayers,
    origin: str,
    log_level: int = logging.INFO,
) -> list[str]:
    """Copy stored parameters into the layers that have the same name; returns the names of those copied.

    All are checked before the first is copied, so that layers keep what they had where something does not fit.

    Args:
        layers: the net's.
        weights: layers with their blobs.
        origin: the file, for messages.
        log_level: for stored layers that the net does not have.

    Raises:
        SnapshotError: a layer has another number of parameters or other shapes, or the stored layers of a name are not
            as many as the net's.
    """
    stored = weights if isinstance(weights, Stored) else Stored(weights)
    pairs = []
    if problem := _ambiguous(stored.message.layer, layers):
        raise SnapshotError(f"{origin}: {problem}")
    targets = dict(_numbered(layers))
    for key, source in _numbered(stored.message.layer):
        target = targets.get(key)
        if target is None:
            log.log(log_level, "Ignoring source layer %s", source.name)
            continue
        _check_layer(source, target, origin)
        pairs.append((source, target))
    for source, target in pairs:
        for index, blob in _stored(source, target).items():
            values = from_blob_proto(blob, _where(origin, target, index), stored.content)
            target.blobs[index].load(values.reshape(target.blobs[index].shape))
        target.adopt(len(source.blobs))
    copied = [source.name for source, target in pairs if target.blobs]
    own = [layer.name for layer in layers if layer.blobs]
    if own and not copied:
        log.warning("%s: nothing is copied: the net's layers (%s) are not in it; is it of another net?", origin,
                    ", ".join(own[:3]) + ", ..." * (len(own) > 3))  # fmt: skip
    return copied


def first_difference(layers: Sequence[Layer], stored: Iterable[LayerParameter]) -> str:
    """The first difference in name or shape between learned layers and stored ones, as a clause; empty: there is none.

    A parameter that a layer shares with an earlier one need not be stored.

    Args:
        layers: the net's.
        stored: layers with the shapes of their blobs; their values are not looked at.
    """
    sources = dict(_numbered(layer for layer in stored if layer.blobs))
    for key, layer in _numbered(layer for layer in layers if layer.blobs):
        own = [index for index, blob in enumerate(layer.blobs) if blob.gradient_owner is blob]
        source = sources.pop(key, None)
        if source is None and own:
            return f"the layer '{layer.name}' is not in it"
        if source is not None and (difference := _different_shape(layer, own, source)):
            return difference
    return next((f"the layer '{name}' in it is not in the net" for name, _ in sources), "")


def _different_shape(layer: Layer, own: Sequence[int], source: LayerParameter) -> str:
    order = layer.stored_order([math.prod(blob_shape(blob)) for blob in source.blobs])
    if len(source.blobs) > len(layer.blobs) or len(order) <= max(own, default=-1):
        return f"the layer '{layer.name}' has {len(source.blobs)} parameters there and {len(layer.blobs)} in the net"
    for index in own:
        blob, mine = source.blobs[order[index]], layer.blobs[index]
        fits = layer.stored_by_count and math.prod(blob_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape):
            return (
                f"parameter {index} of the layer '{layer.name}' has shape {format_shape(blob_shape(blob))} there and "
                f"{format_shape(mine.shape)} in the net"
            )
    return ""


def _numbered(layers: Iterable[Named]) -> Iterator[tuple[tuple[str, int], Named]]:
    """The layers by name and number among those of the same name.

    Layers without parameters do not count where others of their name have some.
    """
    layers = list(layers)
    learned = {layer.name for layer in layers if layer.blobs}
    numbers = Counter[str]()
    for layer in layers:
        if layer.blobs or layer.name not in learned:
            yield (layer.name, numbers[layer.name]), layer
            numbers[layer.name] += 1


def _ambiguous(sources: Sequence[Named], targets: Sequence[Layer]) -> str:
    """The problem where both sides have learned layers of one name, but not as many; empty where there is none."""
    there, here = (Counter(layer.name for layer in layers if layer.blobs) for layers in (sources, targets))
    for name, count in here.items():
        if there[name] and there[name] != count:
            return (
                f"layers of the name '{name}' that have parameters: {there[name]} there, {count} in the net, so that "
                "nothing says which belong together; give each layer a name of its own, and train and save it anew"
            )
    return ""


def _stored(source: LayerParameter, target: Layer) -> dict[int, BlobProto]:
    """A stored layer's parameters by the net's index, without those that another layer holds."""
    order = target.stored_order([math.prod(blob_shape(blob)) for blob in source.blobs])
    return {index: source.blobs[at] for index, at in enumerate(order) if is_stored(source.blobs[at])}


def _where(origin: str, target: Layer, index: int) -> str:
    return f"{origin}: layer '{target.name}', parameter {index}"


def _check_layer(source: LayerParameter, target: Layer, origin: str) -> None:
    """Refuse a stored layer that has not the parameters of the net's; those of an earlier layer need not be stored.

    Raises:
        SnapshotError: other parameters or shapes, or values that are not whole.
    """
    stored = _stored(source, target)
    missing = [i for i, blob in enumerate(target.blobs) if i not in stored and blob.gradient_owner is blob]
    if len(source.blobs) > len(target.blobs) or missing:
        lacking = f" (not there: {', '.join(map(str, missing))})" if len(stored) < len(source.blobs) else ""
        raise SnapshotError(
            f"{origin}: layer '{target.name}' has {len(stored)} parameters there and {len(target.blobs)} "
            f"in the net{lacking}; {target.advice_on_stored(len(source.blobs))}"
        )
    for index, blob in stored.items():
        mine, where = target.blobs[index], _where(origin, target, index)
        fits = target.stored_by_count and math.prod(blob_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape):
            raise SnapshotError(
                f"{where}: shape is {format_shape(blob_shape(blob))} there and {format_shape(mine.shape)} in the "
                "net; rename the layer in the net to learn it from scratch"
            )
        check_values(blob, where)


def share_trained_layers(layers: Sequence[Layer], others: Sequence[Layer], share: Callable[[Blob, Blob], None]) -> None:
    """Let the parameters of `layers` share with those of the layers of `others` that have the same name.

    Args:
        layers: that share.
        others: with which they share.
        share: called with a parameter of `layers` and that of `others`.

    Raises:
        ConfigError: numbers or shapes of parameters differ, or numbers of layers of one name; nothing is shared.
    """
    if problem := _ambiguous(others, layers):
        raise ConfigError(f"cannot share the parameters of another net: {problem}")
    targets = dict(_numbered(layers))
    pairs: list[tuple[Blob, Blob]] = []
    for key, source in _numbered(others):
        target = targets.get(key)
        if target is None:
            continue
        if [b.shape for b in source.blobs] != [b.shape for b in target.blobs]:
            raise target.error(
                "cannot share its parameters with the other net's layer of the same name; shapes are "
                f"{', '.join(format_shape(b.shape) for b in target.blobs) or 'none'} here and "
                f"{', '.join(format_shape(b.shape) for b in source.blobs) or 'none'} there"
            )
        pairs += zip(target.blobs, source.blobs, strict=True)
    for mine, theirs in pairs:
        share(mine, theirs)


# -- writing -------------------------------------------------------------------------------------------


def write_caffemodel(path: Path, name: str, layers: Sequence[Layer], write_diff: bool = False) -> None:
    """Write a net's name and parameters; HDF5 if the path ends in .h5, else the binary format.

    Args:
        path: the file.
        name: the net's.
        layers: the net's. In the binary format a shared parameter is stored with every layer that uses it.
        write_diff: with gradients.

    Raises:
        RunError: the file cannot be written.
    """
    if path.suffix != ".h5":
        write_binary(path, name, layers, write_diff)
        return
    from caffepy.snapshot.hdf5 import write_caffemodel_hdf5

    write_caffemodel_hdf5(path, layers, write_diff)


def write_binary(path: Path, name: str, layers: Sequence[Layer], write_diff: bool = False) -> None:
    """Write the binary format, whatever the path ends in; as `write_caffemodel` otherwise."""
    parts = _net_parts(name, layers, _arrays(write_diff))
    write_parts(path, checksummed(NetParameter, _blob_count(layers), parts))


def check_caffemodel_size(path: Path, name: str, layers: Sequence[Layer], write_diff: bool) -> None:
    """Refuse a net whose binary .caffemodel protobuf could not read; arguments as `write_caffemodel`.

    Raises:
        ConfigError: it would be too large.
    """
    ends = checksummed(NetParameter, _blob_count(layers), [])
    check_size(path, sum(map(len, itertools.chain(ends, _net_parts(name, layers, _zeros(write_diff))))))


def layer_protos(layers: Sequence[Layer], write_diff: bool) -> Iterator[LayerParameter]:
    """Each layer's prototxt with its parameters (and gradients), as binary files hold it, one at a time.

    Cast layers are left out: they come from the net's dtypes and are in no prototxt.
    """
    for layer in _saved_layers(layers):
        saved = _settings(layer)
        saved.blobs.extend(to_blob_proto(*arrays) for arrays in map(_arrays(write_diff), layer.blobs))
        yield saved


_ArraysOf: TypeAlias = Callable[[Blob], "tuple[np.ndarray, np.ndarray | None]"]
"""A blob's values and gradients in host memory."""


def _arrays(write_diff: bool) -> _ArraysOf:
    return lambda blob: (blob.host_data(), blob.host_diff() if write_diff else None)


def _zeros(write_diff: bool) -> _ArraysOf:
    """For a program that counts bytes: the system gives these arrays memory only where they are read."""

    def zeros_of(blob: Blob) -> tuple[np.ndarray, np.ndarray | None]:
        zeros = np.zeros(blob.shape, np.float32)
        return zeros, zeros if write_diff else None

    return zeros_of


def _blob_count(layers: Sequence[Layer]) -> int:
    return sum(len(layer.blobs) for layer in layers)


def _net_parts(name: str, layers: Sequence[Layer], arrays_of: _ArraysOf) -> Iterator[Part]:
    """The bytes of a NetParameter in parts, in the order in which protobuf writes fields, without copies of arrays."""
    yield NetParameter(name=name).SerializeToString()
    for layer in _saved_layers(layers):
        before, behind = _settings(layer), _settings(layer)
        for field in LayerParameter.DESCRIPTOR.fields:
            (behind if field.number < _BLOBS else before).ClearField(field.name)
        parts: list[Part] = [before.SerializeToString()]
        for blob in layer.blobs:
            parts += encode_delimited(_BLOBS, blob_parts(*arrays_of(blob)))
        parts.append(behind.SerializeToString())
        yield from encode_delimited(_LAYER, parts)


def _saved_layers(layers: Sequence[Layer]) -> Iterator[Layer]:
    return (layer for layer in layers if layer.type != "Cast")


def _settings(layer: Layer) -> LayerParameter:
    """A layer's prototxt as it is saved, without its parameters."""
    saved = LayerParameter()
    saved.CopyFrom(layer.param)
    del saved.blobs[:]
    if not saved.loss_weight and any(layer.loss_weights):
        saved.loss_weight.extend(layer.loss_weights)
    return saved
