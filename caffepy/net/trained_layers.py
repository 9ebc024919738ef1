"""Parameters of whole layers between nets and snapshots, matched by the layers' names (Caffe's `net.cpp`).

Caffe lets layers have the same name and takes the last one's parameters for the first; here the first of a name gets
the first one's, the second the second one's. If the two sides have different numbers of them, nothing says which belong
together, and it is an error.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from caffepy.blob import Blob, format_shape
from caffepy.config.lazy_blobs import TrainedLayers
from caffepy.config.messages import Part, delimited
from caffepy.errors import ConfigError, SnapshotError
from caffepy.layers.core.base import Layer
from caffepy.net.weights import (
    blob_parts,
    check_values,
    is_stored,
    load_blob,
    proto_shape,
    same_shape,
    to_blob_proto,
)
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)
Named = TypeVar("Named", Layer, caffe_pb2.LayerParameter)
_BLOBS, _LAYER = caffe_pb2.LayerParameter.BLOBS_FIELD_NUMBER, caffe_pb2.NetParameter.LAYER_FIELD_NUMBER


def copy_trained_layers(
    layers: Sequence[Layer],
    weights: caffe_pb2.NetParameter | TrainedLayers,
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
    stored = weights if isinstance(weights, TrainedLayers) else TrainedLayers(weights)
    pairs = []
    if problem := _ambiguous(stored.param.layer, layers):
        raise SnapshotError(f"{origin}: {problem}")
    targets = dict(_numbered(layers))
    for key, source in _numbered(stored.param.layer):
        target = targets.get(key)
        if target is None:
            log.log(log_level, "Ignoring source layer %s", source.name)
            continue
        _check_layer(source, target, origin)
        pairs.append((source, target))
    for source, target in pairs:
        for index, blob in _stored(source, target).items():
            load_blob(blob, target.blobs[index], _where(origin, target, index), stored.content)
        target.adopt(len(source.blobs))
    copied = [source.name for source, target in pairs if target.blobs]
    own = [layer.name for layer in layers if layer.blobs]
    if own and not copied:
        log.warning("%s: nothing is copied: the net's layers (%s) are not in it; is it of another net?", origin,
                    ", ".join(own[:3]) + ", ..." * (len(own) > 3))  # fmt: skip
    return copied


def first_difference(
    layers: Sequence[Layer], owns: Callable[[Layer, int], bool], stored: Iterable[caffe_pb2.LayerParameter]
) -> str:
    """The first difference in name or shape between learned layers and stored ones, as a clause; empty: there is none.

    Args:
        layers: the net's.
        owns: whether a parameter is the layer's own; a shared one need not be stored.
        stored: layers with the shapes of their blobs; their values are not looked at.
    """
    sources = dict(_numbered(layer for layer in stored if layer.blobs))
    for key, layer in _numbered(layer for layer in layers if layer.blobs):
        own = [index for index in range(len(layer.blobs)) if owns(layer, index)]
        source = sources.pop(key, None)
        if source is None and own:
            return f"the layer '{layer.name}' is not in it"
        if source is not None and (difference := _different_shape(layer, own, source)):
            return difference
    return next((f"the layer '{name}' in it is not in the net" for name, _ in sources), "")


def _different_shape(layer: Layer, own: Sequence[int], source: caffe_pb2.LayerParameter) -> str:
    order = layer.stored_order([math.prod(proto_shape(blob)) for blob in source.blobs])
    if len(source.blobs) > len(layer.blobs) or len(order) <= max(own, default=-1):
        return f"the layer '{layer.name}' has {len(source.blobs)} parameters there and {len(layer.blobs)} in the net"
    for index in own:
        blob, mine = source.blobs[order[index]], layer.blobs[index]
        fits = layer.stored_by_count and math.prod(proto_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape):
            return (
                f"parameter {index} of the layer '{layer.name}' has shape {format_shape(proto_shape(blob))} there and "
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


def _stored(source: caffe_pb2.LayerParameter, target: Layer) -> dict[int, caffe_pb2.BlobProto]:
    """A stored layer's parameters by the net's index, without those that another layer holds."""
    order = target.stored_order([math.prod(proto_shape(blob)) for blob in source.blobs])
    return {index: source.blobs[at] for index, at in enumerate(order) if is_stored(source.blobs[at])}


def _where(origin: str, target: Layer, index: int) -> str:
    return f"{origin}: layer '{target.name}', parameter {index}"


def _check_layer(source: caffe_pb2.LayerParameter, target: Layer, origin: str) -> None:
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
        fits = target.stored_by_count and math.prod(proto_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape):
            raise SnapshotError(
                f"{where}: shape is {format_shape(proto_shape(blob))} there and {format_shape(mine.shape)} in the "
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


def trained_layer_protos(layers: Sequence[Layer], write_diff: bool) -> Iterator[caffe_pb2.LayerParameter]:
    """Each layer's prototxt with its parameters (and gradients), as snapshots hold it, one at a time.

    Cast layers are left out: they come from the net's dtypes and are in no prototxt.
    """
    for layer in _saved_layers(layers):
        saved = _settings(layer)
        saved.blobs.extend(to_blob_proto(*arrays) for arrays in _arrays(layer, write_diff))
        yield saved


def trained_layer_parts(layers: Sequence[Layer], write_diff: bool, with_values: bool = True) -> Iterator[Part]:
    """The bytes of a NetParameter with the layers of `trained_layer_protos`, in parts, without copies of arrays.

    They are in the order in which protobuf writes fields.

    Args:
        layers: the net's.
        write_diff: with gradients.
        with_values: False: zeros stand for the values, for a program that counts bytes.
    """
    stored = _arrays if with_values else _zeros
    for layer in _saved_layers(layers):
        before, behind = _settings(layer), _settings(layer)
        for field in caffe_pb2.LayerParameter.DESCRIPTOR.fields:
            (behind if field.number < _BLOBS else before).ClearField(field.name)
        parts: list[Part] = [before.SerializeToString()]
        for arrays in stored(layer, write_diff):
            parts += delimited(_BLOBS, blob_parts(*arrays))
        parts.append(behind.SerializeToString())
        yield from delimited(_LAYER, parts)


def _saved_layers(layers: Sequence[Layer]) -> Iterator[Layer]:
    return (layer for layer in layers if layer.type != "Cast")


def _settings(layer: Layer) -> caffe_pb2.LayerParameter:
    """A layer's prototxt as it is saved, without its parameters."""
    saved = caffe_pb2.LayerParameter()
    saved.CopyFrom(layer.param)
    del saved.blobs[:]
    if not saved.loss_weight and any(layer.loss_weights):
        saved.loss_weight.extend(layer.loss_weights)
    return saved


def _arrays(layer: Layer, write_diff: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """A layer's parameters and gradients in host memory, one at a time."""
    return ((blob.host_data(), blob.host_diff() if write_diff else None) for blob in layer.blobs)


def _zeros(layer: Layer, write_diff: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Arrays as large as those of `_arrays`; the system gives them memory only where they are read."""
    for blob in layer.blobs:
        zeros = np.zeros(blob.shape, np.float32)
        yield zeros, zeros if write_diff else None
