"""Convolution in both directions and InnerProduct, pooling, and the priors of SSD.

Caffe rounds the number of pooling windows up and cuts the last one off; explicit padding gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from caffepy.export.onnx.graph import LayerView, Windows, exports, product_of
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import BaseConvolutionLayer, beyond_padding
from caffepy.layers.inner_product import LEAST_SQUARE
from caffepy.layers.pooling import PoolingLayer, SPPLayer


@exports("Convolution", form="Conv; Reshape around it where `axis` is not 1")
def convolution(view: LayerView) -> list[str]:
    return _convolve(view, "Conv")


@exports("Deconvolution", form="ConvTranspose; Reshape around it where `axis` is not 1")
def deconvolution(view: LayerView) -> list[str]:
    return _convolve(view, "ConvTranspose")


@exports("Im2col", form="Conv with a filter for each element of the window")
def im2col(view: LayerView) -> str:
    window = _window(view)
    elements, channels = product_of(window.kernel), view.bottoms[0].shape[window.axis]
    one = np.eye(elements, dtype=np.float32).reshape(elements, 1, *window.kernel)
    filters = view.floats(np.tile(one, (channels, *(1,) * (one.ndim - 1))))
    result = view.add("Conv", _as_image(view, 0, window), filters, **window.attributes | {"group": channels})
    return result if window.axis == 1 else view.in_shape_of(result, view.tops[0])


@dataclass(frozen=True)
class _Window:
    """The axes and settings of a convolution; an image without spatial axes has one pixel."""

    axis: int
    kernel: tuple[int, ...]
    attributes: dict[str, Any]


def _window(view: LayerView, reads: bool = True) -> _Window:
    """The settings; `reads`: the windows are read, not written as by Deconvolution."""
    layer = view.layer
    assert isinstance(layer, BaseConvolutionLayer)
    g, end = layer.geometry, list(layer.geometry.pad)
    if reads:
        image, windows = (blob.shape[layer.axis + 1 :] for blob in (view.bottoms[0], view.tops[0]))
        end = [pad + more for pad, more in zip(end, beyond_padding(g, image, windows), strict=True)]
    settings = {"kernel_shape": list(g.kernel), "strides": list(g.stride), "pads": [*g.pad, *end]}
    settings["dilations"] = list(g.dilation)
    return _Window(layer.axis, g.kernel, {**settings, "group": g.group})


def _as_image(view: LayerView, index: int, window: _Window) -> str:
    """A bottom as (N, C, spatial...)."""
    shape = view.bottoms[index].shape
    if window.axis == 1 and len(shape) > 2:
        return view.inputs[index]
    return view.reshaped(view.inputs[index], (-1, *(shape[window.axis :] if len(shape) > 2 else (shape[-1], 1))))


def _convolve(view: LayerView, operator: str) -> list[str]:
    window, layer = _window(view, operator == "Conv"), view.layer
    spatial = len(window.kernel)
    weights = view.parameter(0, None if spatial else (*layer.blobs[0].shape, 1))
    parameters = [weights, *(view.parameter(index) for index in range(1, len(layer.blobs)))]
    attributes = window.attributes if spatial else {"group": window.attributes["group"]}
    tops = []
    for index, top in enumerate(view.tops):
        value = _as_vector_image(view, index, window) if not spatial else _as_image(view, index, window)
        value = view.add(operator, value, *parameters, **attributes)
        tops.append(value if window.axis == 1 and spatial else view.in_shape_of(value, top))
    return tops


def _as_vector_image(view: LayerView, index: int, window: _Window) -> str:
    """A bottom without spatial axes as (N, C, 1)."""
    return view.reshaped(view.inputs[index], (-1, view.bottoms[index].shape[window.axis], 1))


@exports("InnerProduct", form="Flatten, Gemm; Reshape, MatMul, Add where `axis` is not 1")
def inner_product(view: LayerView) -> str:
    param = view.param.inner_product_param
    axis, shape = view.axis(param.axis), view.bottoms[0].shape
    inputs, own = product_of(shape[axis:]), view.weights(0)
    if param.normalize:
        squares = np.square(own, dtype=np.float64).sum(0 if param.transpose else 1, keepdims=True)
        own = (own / np.sqrt(squares + LEAST_SQUARE)).astype(np.float32)
    if axis == 1:
        value = view.x if len(shape) == 2 else view.add("Flatten", view.x, axis=1)
        bias = [view.parameter(1)] if param.bias_term else []
        return view.add("Gemm", value, view.floats(own, "W"), *bias, transB=0 if param.transpose else 1)
    rows = view.reshaped(view.x, (-1, inputs))
    weights = own if param.transpose else own.T
    value = view.add("MatMul", rows, view.floats(weights, "W"))
    value = view.add("Add", value, view.parameter(1)) if param.bias_term else value
    return view.in_shape_of(value, view.tops[0])


_Pool = caffe_pb2.PoolingParameter


@exports("Pooling", form="MaxPool, AveragePool, with Mul where the divisors differ; global ones; STOCHASTIC as ratio")
def pooling(view: LayerView) -> str | list[str]:
    param, layer = view.param.pooling_param, view.layer
    assert isinstance(layer, PoolingLayer)
    windows = view.windows(layer.geometry)
    if param.pool == _Pool.MAX:
        return _maximum(view, windows)
    if param.pool == _Pool.AVE:
        return view.average(view.x, windows)
    squares = view.average(view.add("Mul", view.x, view.x), windows)
    totals = view.average(view.x, windows)
    positive = view.add("Greater", totals, view.floats(0))
    return view.add("Where", positive, view.add("Div", squares, totals), view.floats(0))


def _maximum(view: LayerView, windows: Windows) -> str | list[str]:
    if len(view.tops) == 1:
        if view.param.pooling_param.global_pooling:
            return view.add("GlobalMaxPool", view.x)
        return view.add("MaxPool", view.x, **windows.attributes)
    value, index = view.add_many("MaxPool", 2, view.x, **windows.attributes)
    height, width = view.bottoms[0].shape[2:]
    within = view.add("Mod", index, view.graph.constant(np.array(height * width), f"{view.layer.name}/pixels"))
    return [value, view.add("Cast", within, to=TensorProto.FLOAT)]


@exports("SPP", form="MaxPool or AveragePool of each level, Flatten, Concat")
def spatial_pyramid(view: LayerView) -> str:
    layer = view.layer
    assert isinstance(layer, SPPLayer)
    values = []
    for level, blob in layer.levels:
        inner = LayerView(view.graph, level, view.inputs, view.bottoms, [blob], view.varying)
        value = pooling(inner)
        assert isinstance(value, str)
        values.append(value)
    if len(values) == 1:
        return values[0]
    return view.add("Concat", *(view.add("Flatten", value, axis=1) for value in values), axis=1)


@exports("PriorBox", form="a constant")
def prior_box(view: LayerView) -> str:
    for blob in view.bottoms:
        view.refuse_varying(blob, (2, 3))
    view.layer.forward(view.bottoms, view.tops)
    boxes = np.asarray(view.tops[0].host_data())
    assert product_of(boxes.shape)
    return view.floats(boxes, "priors")
