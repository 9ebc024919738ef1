"""LRN, BatchNorm, MVN, Normalize, and what multiplies or adds by channel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.export.onnx.graph import LayerView, Windows, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.normalization import FEATURE_EPS
from caffepy.layers.scale import BroadcastLayer

_LEAST = 1.1754943508222875e-38
"""FLT_MIN, the least eps of Normalize."""


@exports("LRN", form="LRN; WITHIN_CHANNEL as AveragePool of squares, Mul, Add, Pow")
def local_response(view: LayerView) -> str:
    param = view.param.lrn_param
    size, alpha, beta = param.local_size, param.alpha, param.beta
    if param.norm_region == caffe_pb2.LRNParameter.ACROSS_CHANNELS:
        return view.add("LRN", view.x, size=size, alpha=alpha, beta=beta, bias=param.k)
    image, half = view.bottoms[0].shape[2:], (size - 1) // 2
    squares = view.average(view.add("Mul", view.x, view.x), Windows(image, image, (size, size), (1, 1), (half, half)))
    factor = view.add("Pow", view.scaled(squares, alpha, 1.0), view.floats(-beta))
    return view.add("Mul", view.x, factor)


def statistics(layer: BatchNormLayer) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """The stored mean and variance, and what is added to the variance, in the net's dialect."""
    state = layer.normalisation()
    mean, variance, count = (
        np.asarray(layer.backend.to_host(a), np.float32) for a in (state.sum_mean, state.sum_variance, state.count)
    )
    factor = np.float32(1 / count[0]) if count[0] else np.float32(0)
    return mean * factor, variance * factor, state.epsilon


@exports("BatchNorm", form="BatchNormalization; with use_global_stats: false ReduceMean, Sub, Mul, Add, Sqrt, Div")
def batch_norm(view: LayerView) -> str:
    layer = view.layer
    assert isinstance(layer, BatchNormLayer)
    channels = layer.blobs[0].shape[0]
    if len(view.tops) > 1:
        raise view.error("its tops with the batch's statistics cannot be exported; leave them out")
    ends = [view.parameter(index) for index in layer.learned] if layer.scale_bias else []
    if not layer.uses_stored:
        return _by_batch(view, layer, ends)
    ends = ends or [view.floats(np.ones(channels), "scale"), view.floats(np.zeros(channels), "bias")]
    mean, variance, epsilon = statistics(layer)
    values = [*ends, view.floats(mean, "mean"), view.floats(variance, "variance")]
    return view.add("BatchNormalization", view.x, *values, epsilon=epsilon)


def _by_batch(view: LayerView, layer: BatchNormLayer, ends: list[str]) -> str:
    axes = [axis for axis in range(len(view.bottoms[0].shape)) if axis != 1]
    centred = view.add("Sub", view.x, view.reduce("ReduceMean", view.x, axes))
    variance = view.reduce("ReduceMean", view.add("Mul", centred, centred), axes)
    value = view.add("Div", centred, view.add("Sqrt", view.scaled(variance, 1, layer.normalisation().epsilon)))
    shape = (-1, *(1,) * (len(view.bottoms[0].shape) - 2))
    if not ends:
        return value
    scale, bias = (view.parameter(index, shape) for index in layer.learned)
    return view.add("Add", view.add("Mul", value, scale), bias)


def _operand(view: LayerView, index: int | None) -> str:
    """What is multiplied or added, with axes of size 1 behind its own, so that ONNX broadcasts it as Caffe does.

    Args:
        view: the layer.
        index: of the parameter; None: it is the second bottom.
    """
    layer = view.layer
    assert isinstance(layer, BroadcastLayer)
    own: Blob = view.bottoms[1] if index is None else layer.blobs[index]
    behind = len(view.bottoms[0].shape) - layer.axis - len(own.shape) if own.shape else 0
    if index is not None:
        return view.parameter(index, (*own.shape, *(1,) * behind))
    if not behind:
        return view.inputs[1]
    return view.add("Unsqueeze", view.inputs[1], view.ints(*range(len(own.shape), len(own.shape) + behind)))


@exports("Scale", form="Mul, Add; Unsqueeze of a second bottom")
def scale(view: LayerView) -> str:
    learned = len(view.bottoms) == 1
    value = view.add("Mul", view.x, _operand(view, 0 if learned else None))
    if not view.param.scale_param.bias_term:
        return value
    return view.add("Add", value, _operand(view, 1 if learned else 0))


@exports("Bias", form="Add; Unsqueeze of a second bottom")
def bias(view: LayerView) -> str:
    return view.add("Add", view.x, _operand(view, 0 if len(view.bottoms) == 1 else None))


@exports("Axpy", form="Reshape, Mul, Add")
def axpy(view: LayerView) -> str:
    factors = view.reshaped(view.x, (0, 0, *(1,) * (len(view.bottoms[1].shape) - 2)))
    return view.add("Add", view.add("Mul", view.inputs[1], factors), view.inputs[2])


@exports("MVN", form="ReduceMean, Sub, Mul, Sqrt, Add, Div", composite=True)
def mean_variance(view: LayerView) -> str:
    param = view.param.mvn_param
    value = view.x if len(view.bottoms[0].shape) == 4 else view.in_shape_of(view.x, view.tops[0])
    axes = (1, 2, 3) if param.across_channels else (2, 3)
    centred = view.add("Sub", value, view.reduce("ReduceMean", value, axes))
    if not param.normalize_variance:
        return centred
    variance = view.reduce("ReduceMean", view.add("Mul", centred, centred), axes)
    return view.add("Div", centred, view.scaled(view.add("Sqrt", variance), 1, param.eps))


@exports(
    "Normalize",
    form="Mul, ReduceSum, Add, Sqrt, Div, Mul; with normalize_param ReduceL1 for its L1, and no last Mul",
    composite=True,
)
def normalize(view: LayerView) -> str | list[str]:
    if not view.layer.blobs:
        return _feature_normalize(view)
    param, axes = view.param.norm_param, len(view.bottoms[0].shape)
    summed = range(1, axes) if param.across_spatial else (1,)
    total = view.reduce("ReduceSum", view.add("Mul", view.x, view.x), tuple(summed))
    length = view.add("Sqrt", view.scaled(total, 1, max(param.eps, _LEAST)))
    shape = () if param.channel_shared else (-1, *(1,) * (axes - 2))
    return view.add("Mul", view.add("Div", view.x, length), view.parameter(0, shape))


def _feature_normalize(view: LayerView) -> list[str]:
    """Normalize of caffe-windows, with its norm as a second top."""
    kind = view.param.normalize_param.normalize_type
    if kind == "L1":
        length = view.scaled(view.reduce("ReduceL1", view.x, (1,)), 1, FEATURE_EPS[kind])
    else:
        total = view.reduce("ReduceSum", view.add("Mul", view.x, view.x), (1,))
        length = view.add("Sqrt", view.scaled(total, 1, FEATURE_EPS[kind]))
    tops = [view.add("Div", view.x, length)]
    return tops if len(view.tops) == 1 else [*tops, view.in_shape_of(length, view.tops[1])]
