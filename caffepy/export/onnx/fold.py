"""Folding of BatchNorm, Scale and Bias into preceding layers, on NetParameter messages."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.formats.binary import from_blob_proto, to_blob_proto
from caffepy.formats.dialect import LEAST_EPSILON
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net

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
        if layer.type == "BatchNorm" and (
            layer.batch_norm_param.use_global_stats or not layer.batch_norm_param.HasField("use_global_stats")
        ):
            _as_scale(layer, nvidia)
        elif layer.type == "BN" and (layer.bn_param.bn_mode or len(layer.blobs) > 2):
            _bn_as_scale(layer)
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
    """Convert a BatchNorm with stored statistics to a Scale."""
    param = layer.batch_norm_param
    mean, variance, count = (_values(layer, index) for index in range(3))
    factor = 1.0 if nvidia else (1 / count[0] if count[0] else 0.0)
    epsilon = max(param.eps, LEAST_EPSILON) if nvidia else param.eps
    scale = 1 / np.sqrt(variance * factor + np.float64(np.float32(epsilon)))
    term = -mean * factor * scale
    if len(layer.blobs) > 3:
        own, bias = _values(layer, 3), _values(layer, 4)
        scale, term = scale * own, term * own + bias
    layer.type = "Scale"
    layer.ClearField("batch_norm_param")
    del layer.param[:]
    layer.scale_param.bias_term = True
    _put(layer, scale, term)


def _bn_as_scale(layer: caffe_pb2.LayerParameter) -> None:
    """Convert a BN with stored statistics, or SegNet's with none, to a Scale."""
    scale, term = _values(layer, 0).ravel(), _values(layer, 1).ravel()
    if len(layer.blobs) > 2:
        mean, stored = _values(layer, 2).ravel(), _values(layer, 3).ravel()
        inverse = stored if layer.bn_param.inverse_std else (stored + np.float64(layer.bn_param.eps)) ** -0.5
        scale, term = scale * inverse, term - mean * scale * inverse
    layer.type = "Scale"
    layer.ClearField("bn_param")
    del layer.param[:]
    layer.scale_param.bias_term = True
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
