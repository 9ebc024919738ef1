"""From files to the net that is exported: layers of training left out, batch set, weights loaded, normalization folded.

BatchNorm, Scale and Bias are folded into preceding layers on NetParameter messages.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import create_backend
from caffepy.backend.interface import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.formats.binary import from_blob_proto, to_blob_proto
from caffepy.formats.caffemodel import read_caffemodel
from caffepy.formats.dialect import LEAST_EPSILON, Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state, read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class, replaces_built_in
from caffepy.net import Net
from caffepy.net.memory_plan import with_batch

# -- the net -------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_ONLY_FOR_TRAINING = frozenset({"Accuracy", "DetectionEvaluate", "FLOWriter", "HDF5Output", "ImgWriter"})
"""Layers without a loss that no net for inference needs."""

_STATISTICS = ("BatchNorm", "BN")
"""Layers whose parameters stay float32: a variance may be beyond the range of float16."""


@dataclass(frozen=True)
class Settings:
    """How a net is built for export.

    Args:
        phase: whose layers are taken; all compute as in TEST.
        level: the net state's.
        stages: likewise.
        batch: the first axis of all inputs; None: as the prototxt says.
    """

    phase: int = caffe_pb2.TEST
    level: int | None = None
    stages: Sequence[str] = field(default_factory=tuple)
    batch: int | None = None


def open_for_export(model: Path, weights: Sequence[Path], settings: Settings) -> tuple[Net, caffe_pb2.NetParameter]:
    """The net with its weights, on the CPU, and the message that it was built of.

    Raises:
        CaffepyError: whatever is wrong with the files.
    """
    whole = read_net(model)
    param = inference_net(whole, settings)
    net = build(param, create_backend(), model, choose_dialect([whole]))
    for path in weights:
        net.copy_trained_layers_from(read_caffemodel(path), str(path))
    return net, param


def round_to_half(net: Net) -> None:
    """Round the net's parameters to float16, but for the statistics of BatchNorm.

    Raises:
        ConfigError: a value is beyond the range of float16.
    """
    for layer in net.layers:
        if layer.type in _STATISTICS:
            continue
        for index, blob in enumerate(layer.blobs):
            with np.errstate(over="ignore"):
                values = np.asarray(blob.host_data(), np.float32).astype(np.float16)
            if not np.isfinite(values).all():
                raise layer.error(f"parameter {index} has values that float16 cannot hold; export without --half")
            net.backend.from_host(values.astype(np.float32), blob.data)


def as_half(values: NDArray[Any]) -> NDArray[Any]:
    """Return float32 values as float16 if none of them changes, else unchanged."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.array_equal(half.astype(values.dtype), values) else values


def build(param: caffe_pb2.NetParameter, backend: Backend, model: Path = Path(), dialect: Dialect | None = None) -> Net:
    """A net for inference.

    Args:
        param: its layers.
        backend: where it computes.
        model: its file, for the paths in it.
        dialect: that of the net that `param` is a part of; None: the fields of `param` choose it.
    """
    with backend.activate():
        context = LayerContext(backend, phase=caffe_pb2.TEST, resolve=PathResolver(model), dialect=dialect)
        return Net(param, context, param.state)


def varying_axes(param: caffe_pb2.NetParameter, model: Path = Path()) -> dict[str, list[bool]]:
    """Of each blob's axes whether their size follows the batch."""
    first, second = (build(with_batch(param, batch), MetaBackend(), model) for batch in (2, 3))
    found = {}
    for name, blob in first.blobs.items():
        other = second.blobs[name].shape
        if len(other) != len(blob.shape):
            raise ConfigError(f"blob '{name}' has another number of axes for another batch; export it with --batch N")
        found[name] = [a != b for a, b in zip(blob.shape, other, strict=True)]
    return found


def inference_net(param: caffe_pb2.NetParameter, settings: Settings) -> caffe_pb2.NetParameter:
    """The layers of a net that inference needs, filtered by phase, with the batch set.

    Inputs that none of these layers reads, such as labels, are left out.

    Raises:
        ConfigError: a layer reads records, or nothing is left.
    """
    own = caffe_pb2.NetState(level=settings.level, stage=settings.stages)
    net = filter_net(param, net_state(settings.phase, param.state, own))
    kept = [layer for layer in net.layer if not _is_for_training(layer)]
    read = {bottom for layer in kept for bottom in layer.bottom}
    result = caffe_pb2.NetParameter(name=net.name, state=net.state)
    result.state.phase = caffe_pb2.TEST
    for layer in kept:
        own_layer = _without_unread(layer, read)
        if own_layer is not None:
            own_layer.phase = caffe_pb2.TEST
            result.layer.append(own_layer)
    if not any(layer.type != "Input" for layer in result.layer):
        phase = caffe_pb2.Phase.Name(net.state.phase)
        raise ConfigError(f"the net has no layers for inference in the {phase} phase; give --phase or --stage")
    return with_batch(result, settings.batch) if settings.batch is not None else result


def _is_for_training(layer: caffe_pb2.LayerParameter) -> bool:
    return layer.type in _ONLY_FOR_TRAINING or layer_class(layer.type, f"layer '{layer.name}'").is_loss


def _without_unread(layer: caffe_pb2.LayerParameter, read: set[str]) -> caffe_pb2.LayerParameter | None:
    """The layer, an Input without the tops that no layer reads; None if no top is left."""
    cls = layer_class(layer.type)
    if replaces_built_in(layer.type):
        raise ConfigError(
            f"layer '{layer.name}' ({layer.type}) is of a class that the program registered, which cannot be exported"
        )
    made = cls.reads_shapes_only or layer.type in ("Input", "Parameter", "DummyData")
    if cls.prefetches or (cls.bottoms == (0, 0) and not made):
        raise ConfigError(
            f"layer '{layer.name}' ({layer.type}) reads records, which an exported net does not; export the deploy "
            "net, whose Input layer says the image's shape"
        )
    result = caffe_pb2.LayerParameter()
    result.CopyFrom(layer)
    if layer.type != "Input":
        return result
    chosen = [index for index, top in enumerate(layer.top) if top in read]
    for top in set(layer.top) - read:
        log.info("input '%s' is left out: no layer of the export reads it", top)
    shapes = layer.input_param.shape
    del result.top[:], result.input_param.shape[:]
    result.top.extend(layer.top[index] for index in chosen)
    result.input_param.shape.extend(
        [shapes[index] for index in chosen] if len(shapes) == len(layer.top) else list(shapes)
    )
    return result if chosen else None


# -- folding -------------------------------------------------------------------------------------------

Array: TypeAlias = NDArray[np.float64]
Affine: TypeAlias = "tuple[Array, Array]"
"""Factor and term of each channel."""

_CONVOLUTIONS = ("Convolution", "DepthwiseConvolution", "ConvolutionDepthwise", "Deconvolution")


def with_parameters(param: caffe_pb2.NetParameter, net: Net) -> caffe_pb2.NetParameter:
    """Return a copy of a net's message, filtered for the net's phase, with the net's parameters."""
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    built = iter(net.layers)  # in the message's order, with Split and Cast layers in between
    for layer in result.layer:
        made = next(one for one in built if (one.name, one.type) == (layer.name, layer.type))
        del layer.blobs[:]
        layer.blobs.extend(to_blob_proto(np.asarray(blob.host_data())) for blob in made.blobs)
    return result


def fold_batch_norms(net: caffe_pb2.NetParameter, nvidia: bool = False) -> caffe_pb2.NetParameter:
    """Return the net without BatchNorm: each becomes a Scale, merged into the preceding layer if possible.

    Args:
        net: a net with parameters; not modified.
        nvidia: whether the net has NVIDIA's dialect.
    """
    result = caffe_pb2.NetParameter()
    result.CopyFrom(net)
    for layer in result.layer:
        if (
            layer.type == "BatchNorm"
            and (layer.batch_norm_param.use_global_stats or not layer.batch_norm_param.HasField("use_global_stats"))
            or layer.type == "BN"
            and (layer.bn_param.bn_mode or len(layer.blobs) > 2)
        ):
            _as_scale(layer, nvidia)
    return merge_scales(result, ("Scale", "InnerProduct", *_CONVOLUTIONS))


def merge_scales(net: caffe_pb2.NetParameter, into: tuple[str, ...] = ("Scale",)) -> caffe_pb2.NetParameter:
    """Return the net with each channel-wise Scale and Bias merged into a preceding layer of a type in `into`.

    Only if no other layer reads that layer's top.
    """
    layers = list(net.layer)
    while (pair := _next_pair(layers, into)) is not None:
        target, index = pair
        _apply(layers[target], _affine(layers[index]))
        layers[target].top[0] = layers[index].top[0]
        del layers[index]
    result = caffe_pb2.NetParameter(name=net.name, layer=layers)
    if net.HasField("state"):
        result.state.CopyFrom(net.state)
    return result


def _next_pair(layers: list[caffe_pb2.LayerParameter], into: tuple[str, ...]) -> tuple[int, int] | None:
    """Return the indices of a layer and the Scale or Bias to merge into it, or None."""
    writers: dict[str, int] = {}
    sources = []
    for index, layer in enumerate(layers):
        sources.append([writers.get(bottom, -1) for bottom in layer.bottom])
        writers.update(dict.fromkeys(layer.top, index))
    readers = Counter(source for found in sources for source in found)
    written = Counter(top for layer in layers for top in set(layer.top))
    for index, layer in enumerate(layers):
        target = sources[index][0] if len(sources[index]) == 1 else -1
        if target < 0 or readers[target] != 1 or layers[target].type not in into or not _is_affine(layer):
            continue
        in_place = layer.top[0] == layer.bottom[0]
        if _takes(layers[target], layer) and (in_place or (written[layer.top[0]] == 1)):
            return target, index
    return None


def _is_affine(layer: caffe_pb2.LayerParameter) -> bool:
    """Return whether a layer multiplies or adds one stored value per channel."""
    if layer.type not in ("Scale", "Bias") or not layer.blobs or any(param.name for param in layer.param):
        return False
    field = layer.scale_param if layer.type == "Scale" else layer.bias_param
    return field.axis == 1 and len(_values(layer, 0).shape) == 1 and len(layer.bottom) == 1


def _takes(target: caffe_pb2.LayerParameter, layer: caffe_pb2.LayerParameter) -> bool:
    """Return whether `layer` can be merged into the parameters of `target`."""
    if len(target.top) != 1 or not target.blobs or any(param.name for param in target.param):
        return False
    if target.type == "Scale":
        return _is_affine(target) and _values(target, 0).shape == _values(layer, 0).shape
    if target.type == "InnerProduct":
        return bool(target.inner_product_param.axis == 1) and not target.inner_product_param.normalize
    return bool(target.convolution_param.axis == 1)


def _values(layer: caffe_pb2.LayerParameter, index: int) -> Array:
    return from_blob_proto(layer.blobs[index], f"layer '{layer.name}'").astype(np.float64)


def _affine(layer: caffe_pb2.LayerParameter) -> Affine:
    values = _values(layer, 0)
    if layer.type == "Bias":
        return np.ones_like(values), values
    return values, _values(layer, 1) if layer.scale_param.bias_term else np.zeros_like(values)


def _put(layer: caffe_pb2.LayerParameter, *values: NDArray[Any]) -> None:
    del layer.blobs[:]
    layer.blobs.extend(to_blob_proto(np.asarray(value, np.float32)) for value in values)


def _as_scale(layer: caffe_pb2.LayerParameter, nvidia: bool) -> None:
    """Convert a BatchNorm or BN with stored statistics, or SegNet's with none, to a Scale."""
    values = [_values(layer, index).ravel() for index in range(len(layer.blobs))]
    if layer.type == "BatchNorm":
        mean, variance, count, *own = values
        param = layer.batch_norm_param
        factor = 1.0 if nvidia else (1 / count[0] if count[0] else 0.0)
        epsilon = max(param.eps, LEAST_EPSILON) if nvidia else param.eps
        scale = 1 / np.sqrt(variance * factor + np.float64(np.float32(epsilon)))
        term = -mean * factor * scale
        if own:
            scale, term = scale * own[0], term * own[0] + own[1]
    else:
        scale, term, *stored = values
        if stored:
            mean, variance = stored
            inverse = variance if layer.bn_param.inverse_std else (variance + np.float64(layer.bn_param.eps)) ** -0.5
            scale, term = scale * inverse, term - mean * scale * inverse
    for name in ("batch_norm_param", "bn_param", "param"):
        layer.ClearField(name)
    layer.type, layer.scale_param.bias_term = "Scale", True
    _put(layer, scale, term)


def _apply(layer: caffe_pb2.LayerParameter, affine: Affine) -> None:
    """Apply channel factors and terms to a layer's parameters."""
    factor, term = affine
    weights = _values(layer, 0)
    bias = _values(layer, 1) if len(layer.blobs) > 1 else np.zeros_like(term)
    if layer.type == "Scale":
        layer.scale_param.bias_term = True
        weights = weights * factor
    elif layer.type == "InnerProduct":
        layer.inner_product_param.bias_term = True
        weights = weights * factor if layer.inner_product_param.transpose else weights * factor[:, None]
    else:
        layer.convolution_param.bias_term = True
        weights = _scaled_filters(layer, weights, factor)
    _put(layer, weights, bias * factor + term)


def _scaled_filters(layer: caffe_pb2.LayerParameter, weights: Array, factor: Array) -> Array:
    if layer.type != "Deconvolution":
        return weights * factor.reshape(-1, *(1,) * (weights.ndim - 1))
    group = layer.convolution_param.group
    grouped = weights.reshape(group, -1, *weights.shape[1:])
    factors = factor.reshape(group, 1, -1, *(1,) * (weights.ndim - 2))
    return np.asarray((grouped * factors).reshape(weights.shape), np.float64)
