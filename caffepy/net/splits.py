"""Automatic Split layers: a top that several layers (or a layer and the loss) use becomes several.

Gradients of the users are then added up in one place, the Split's backward pass. Names are those of Caffe's
`insert_splits.cpp`, because snapshots and scripts hold them.
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
    """A copy of `param` with a Split layer after each layer whose top is used more than once.

    A nonzero loss weight written at a top counts as a use; it moves to the Split's first top. What is left behind is an
    explicit 0, where Caffe leaves nothing: its loss layers take that for 1 and add their loss twice, and the weights of
    the layer's other tops are lost.

    Raises:
        ConfigError: a bottom that no earlier layer produces; the message offers the nearest name.
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
    """Whether the name of a blob is that of a top of `original`'s Split."""
    return blob.startswith(f"{original}_") and re.search(r"_split_\d+$", blob) is not None


def find_sources(param: caffe_pb2.NetParameter) -> dict[tuple[int, int], Source]:
    """For each (layer, bottom) the top that it reads: the last one of that name so far."""
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
    """The error for a bottom that is not there, with the nearest name that is; `state` chose the layers."""
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
