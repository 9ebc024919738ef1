"""Automatic Split layers, for tops that several layers (or a layer and the loss) use.

The Split's backward pass sums the users' gradients. Names equal those of Caffe's `insert_splits.cpp`, because snapshots
and scripts contain them.
"""

from __future__ import annotations

import re
from collections import Counter

from caffepy.errors import ConfigError
from caffepy.proto import caffe_pb2
from caffepy.registry import suggest

Source = tuple[int, int]
"""A top: (index of the layer, index of the top)."""


def insert_splits(param: caffe_pb2.NetParameter) -> caffe_pb2.NetParameter:
    """Return a copy of `param` with a Split layer after each layer whose top is used more than once.

    A nonzero loss weight of a top counts as a use; it moves to the Split's first top. An explicit 0 remains at the
    layer. Caffe leaves nothing there: its loss layers then default to 1 and count their loss twice, and the weights of
    the layer's other tops are lost.

    Raises:
        ConfigError: no earlier layer produces a bottom; the message suggests the nearest name.
    """
    sources = find_sources(param)
    uses = Counter(sources.values())
    weights = _written_loss_weights(param)
    uses.update(weights.keys())
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    del result.layer[:]
    used = Counter(weights.keys())
    for i, original in enumerate(param.layer):
        layer = result.layer.add()
        layer.CopyFrom(original)
        for j in range(len(layer.bottom)):
            source = sources[i, j]
            if uses[source] > 1:
                producer = param.layer[source[0]]
                layer.bottom[j] = split_blob_name(producer, source[1], used[source])
                used[source] += 1
        for j in range(len(original.top)):
            if uses[i, j] > 1:
                _add_split(result, original, j, uses[i, j], weights.get((i, j), 0.0))
                if (i, j) in weights:
                    layer.loss_weight[j] = 0
    return result


def split_layer_name(layer: caffe_pb2.LayerParameter, top: int) -> str:
    """``<blob>_<layer>_<top's index>_split``."""
    return f"{layer.top[top]}_{layer.name}_{top}_split"


def split_blob_name(layer: caffe_pb2.LayerParameter, top: int, use: int) -> str:
    """``<blob>_<layer>_<top's index>_split_<use>``."""
    return f"{split_layer_name(layer, top)}_{use}"


def is_split_of(blob: str, original: str) -> bool:
    """Return whether a blob's name is that of a top of `original`'s Split."""
    return blob.startswith(f"{original}_") and re.search(r"_split_\d+$", blob) is not None


def find_sources(param: caffe_pb2.NetParameter) -> dict[tuple[int, int], Source]:
    """Return for each (layer, bottom) its source: the last earlier top of that name."""
    last: dict[str, Source] = {}
    sources = {}
    for i, layer in enumerate(param.layer):
        for j, name in enumerate(layer.bottom):
            if name not in last:
                raise unknown_bottom(layer, j, list(last), param.state)
            sources[i, j] = last[name]
        for j, name in enumerate(layer.top):
            last[name] = (i, j)
    return sources


def unknown_bottom(
    layer: caffe_pb2.LayerParameter, index: int, known: list[str], state: caffe_pb2.NetState | None = None
) -> ConfigError:
    """Return the error for an unknown bottom, with the nearest known name; `state` selected the layers."""
    offer = "no layer before it produces any"
    if known:
        offer = suggest(layer.bottom[index], known)
    elif state is not None and state.HasField("phase"):
        phase = caffe_pb2.Phase.Name(state.phase)
        offer += f" in phase {phase}; a layer with include {{ phase: {phase} }}, or without include rules, must"
    return ConfigError(
        f"layer '{layer.name}' ({layer.type}): unknown bottom blob '{layer.bottom[index]}' (bottom {index}); {offer}"
    )


def _written_loss_weights(param: caffe_pb2.NetParameter) -> dict[Source, float]:
    return {
        (i, j): weight
        for i, layer in enumerate(param.layer)
        for j, (weight, _) in enumerate(zip(layer.loss_weight, layer.top, strict=False))
        if weight
    }


def _add_split(
    net: caffe_pb2.NetParameter, layer: caffe_pb2.LayerParameter, top: int, count: int, loss_weight: float
) -> None:
    split = net.layer.add(name=split_layer_name(layer, top), type="Split")
    if layer.HasField("phase"):
        split.phase = layer.phase
    split.bottom.append(layer.top[top])
    split.top.extend(split_blob_name(layer, top, k) for k in range(count))
    if loss_weight:
        split.loss_weight.extend([loss_weight] + [0.0] * (count - 1))
