"""Parameters of a file or of another net, copied to the layers of a net that have their names.

Caffe allows several layers of one name and copies the last one's parameters to the first. caffepy matches layers of one
name in order: the first to the first, the second to the second. Different numbers of layers of one name are an error.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from caffepy.errors import ConfigError, SnapshotError
from caffepy.formats.binary import (
    StoredMessage,
    blob_shape,
    check_values,
    from_blob_proto,
    is_stored,
    same_shape,
)
from caffepy.formats.blobs import format_shape
from caffepy.formats.caffemodel import TrainedLayers, log
from caffepy.formats.proto.caffe_pb2 import (
    BlobProto,
    LayerParameter,
    NetParameter,
)
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer

LayerT = TypeVar("LayerT", Layer, LayerParameter)


# -- copying into a net's layers -----------------------------------------------------------------------


def copy_trained_layers(
    layers: Sequence[Layer],
    weights: NetParameter | TrainedLayers,
    origin: str,
    log_level: int = logging.INFO,
) -> list[str]:
    """Copy stored parameters into layers of the same name; return the names of the copied layers.

    All layers are checked before the first is copied: after an error no layer has changed.

    Args:
        layers: the net's layers.
        weights: stored layers with blobs.
        origin: file name for messages.
        log_level: log level of messages about stored layers that the net does not have.

    Raises:
        SnapshotError: a layer's number of parameters or shapes differ, or the numbers of layers of one name differ.
    """
    stored = weights if isinstance(weights, StoredMessage) else StoredMessage(weights)
    pairs = []
    if problem := _name_mismatch(stored.message.layer, layers):
        raise SnapshotError(f"{origin}: {problem}")
    targets = dict(_with_name_index(layers))
    for key, source in _with_name_index(stored.message.layer):
        target = targets.get(key)
        if target is None:
            log.log(log_level, "Ignoring source layer %s", source.name)
            continue
        _check_layer(source, target, origin)
        pairs.append((source, target))
    for source, target in pairs:
        for index, blob in _stored_parameters(source, target).items():
            values = from_blob_proto(blob, _where(origin, target, index), stored.content)
            if not same_shape(blob, target.blobs[index].shape) and target.accepts_shape(index, blob_shape(blob)):
                values = target.convert_shape(index, values.reshape(blob_shape(blob)))
            target.blobs[index].load(values.reshape(target.blobs[index].shape))
        target.convert_loaded(len(source.blobs))
    copied = [source.name for source, target in pairs if target.blobs]
    own = [layer.name for layer in layers if layer.blobs]
    if own and not copied:
        log.warning(
            "%s: no layer was copied: it has none of the net's layers (%s); is it from another net?",
            origin,
            ", ".join(own[:3]) + ", ..." * (len(own) > 3),
        )
    return copied


def first_difference(layers: Sequence[Layer], stored: Iterable[LayerParameter]) -> str:
    """Return the first difference in name or shape between the net's and stored layers as a clause, or ''.

    A parameter shared with an earlier layer need not be stored.

    Args:
        layers: the net's layers.
        stored: stored layers; only the shapes of their blobs are used.
    """
    sources = dict(_with_name_index(layer for layer in stored if layer.blobs))
    for key, layer in _with_name_index(layer for layer in layers if layer.blobs):
        own = [index for index, blob in enumerate(layer.blobs) if blob.gradient_owner is blob]
        source = sources.pop(key, None)
        if source is None and own:
            return f"the layer '{layer.name}' is not in it"
        if source is not None and (difference := _different_shape(layer, own, source)):
            return difference
    return next((f"the layer '{name}' in it is not in the net" for name, _ in sources), "")


def _different_shape(layer: Layer, own: Sequence[int], source: LayerParameter) -> str:
    order = layer.file_blob_order([math.prod(blob_shape(blob)) for blob in source.blobs])
    if len(source.blobs) > len(layer.blobs) or len(order) <= max(own, default=-1):
        return f"the layer '{layer.name}' has {len(source.blobs)} parameters there and {len(layer.blobs)} in the net"
    for index in own:
        blob, mine = source.blobs[order[index]], layer.blobs[index]
        fits = layer.fits_by_count and math.prod(blob_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape):
            return (
                f"parameter {index} of the layer '{layer.name}' has shape {format_shape(blob_shape(blob))} there and "
                f"{format_shape(mine.shape)} in the net"
            )
    return ""


def _with_name_index(layers: Iterable[LayerT]) -> Iterator[tuple[tuple[str, int], LayerT]]:
    """Yield layers with the key (name, index among layers of that name)."""
    # Layers without parameters are skipped if another layer of the same name has parameters.
    layers = list(layers)
    learned = {layer.name for layer in layers if layer.blobs}
    numbers = Counter[str]()
    for layer in layers:
        if layer.blobs or layer.name not in learned:
            yield (layer.name, numbers[layer.name]), layer
            numbers[layer.name] += 1


def _name_mismatch(sources: Sequence[LayerT], targets: Sequence[Layer]) -> str:
    """Return a problem description if both sides have layers of one name but different numbers of them, else ''."""
    there, here = (Counter(layer.name for layer in layers if layer.blobs) for layers in (sources, targets))
    for name, count in here.items():
        if there[name] and there[name] != count:
            return (
                f"layers named '{name}' with parameters: {there[name]} there, {count} in the net, so they cannot be "
                "matched; give each layer a unique name, then train and save again"
            )
    return ""


def _stored_parameters(source: LayerParameter, target: Layer) -> dict[int, BlobProto]:
    """Return a stored layer's parameters by the net's index, without shared ones that another layer stores."""
    order = target.file_blob_order([math.prod(blob_shape(blob)) for blob in source.blobs])
    return {index: source.blobs[at] for index, at in enumerate(order) if is_stored(source.blobs[at])}


def _where(origin: str, target: Layer, index: int) -> str:
    return f"{origin}: layer '{target.name}', parameter {index}"


def _check_layer(source: LayerParameter, target: Layer, origin: str) -> None:
    """Check that a stored layer has the net's parameters; shared ones need not be stored."""
    stored = _stored_parameters(source, target)
    missing = [i for i, blob in enumerate(target.blobs) if i not in stored and blob.gradient_owner is blob]
    if len(source.blobs) > len(target.blobs) or missing:
        lacking = f" (missing: {', '.join(map(str, missing))})" if len(stored) < len(source.blobs) else ""
        raise SnapshotError(
            f"{origin}: layer '{target.name}' has {len(stored)} parameters there and {len(target.blobs)} "
            f"in the net{lacking}; {target.blob_count_advice(len(source.blobs))}"
        )
    for index, blob in stored.items():
        mine, where = target.blobs[index], _where(origin, target, index)
        fits = target.fits_by_count and math.prod(blob_shape(blob)) == mine.count
        if not fits and not same_shape(blob, mine.shape) and not target.accepts_shape(index, blob_shape(blob)):
            raise SnapshotError(
                f"{where}: shape is {format_shape(blob_shape(blob))} there and {format_shape(mine.shape)} in the "
                "net; rename the layer in the net to learn it from scratch"
            )
        check_values(blob, where)


def share_trained_layers(layers: Sequence[Layer], others: Sequence[Layer], share: Callable[[Blob, Blob], None]) -> None:
    """Share the parameters of `layers` with layers of the same name in `others`.

    Args:
        layers: the layers whose parameters become shared.
        others: the layers that own the parameters.
        share: called with a parameter of `layers` and its counterpart in `others`.

    Raises:
        ConfigError: parameters or numbers of layers of one name differ; nothing is shared.
    """
    if problem := _name_mismatch(others, layers):
        raise ConfigError(f"cannot share the parameters of another net: {problem}")
    targets = dict(_with_name_index(layers))
    pairs: list[tuple[Blob, Blob]] = []
    for key, source in _with_name_index(others):
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
