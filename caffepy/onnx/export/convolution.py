"""Convolution in both directions, and InnerProduct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.layers.vision.base_convolution import BaseConvolutionLayer
from caffepy.onnx.export.graph import LayerView, exports, product_of


@exports(
    "Convolution", "DepthwiseConvolution", "ConvolutionDepthwise",
    form="Conv; Reshape around it where `axis` is not 1",
)  # fmt: skip
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


def _window(view: LayerView) -> _Window:
    layer = view.layer
    assert isinstance(layer, BaseConvolutionLayer)
    g = layer.geometry
    settings = {"kernel_shape": list(g.kernel), "strides": list(g.stride), "pads": [*g.pad, *g.pad]}
    settings["dilations"] = list(g.dilation)
    return _Window(layer.axis, g.kernel, {**settings, "group": g.group})


def _as_image(view: LayerView, index: int, window: _Window) -> str:
    """A bottom as (N, C, spatial...)."""
    shape = view.bottoms[index].shape
    if window.axis == 1 and len(shape) > 2:
        return view.inputs[index]
    return view.reshaped(view.inputs[index], (-1, *(shape[window.axis :] if len(shape) > 2 else (shape[-1], 1))))


def _convolve(view: LayerView, operator: str) -> list[str]:
    window, layer = _window(view), view.layer
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
    inputs = product_of(shape[axis:])
    if axis == 1:
        value = view.x if len(shape) == 2 else view.add("Flatten", view.x, axis=1)
        bias = [view.parameter(1)] if param.bias_term else []
        return view.add("Gemm", value, view.parameter(0), *bias, transB=0 if param.transpose else 1)
    rows = view.reshaped(view.x, (-1, inputs))
    weights = view.weights(0) if param.transpose else view.weights(0).T
    value = view.add("MatMul", rows, view.floats(weights, "W"))
    value = view.add("Add", value, view.parameter(1)) if param.bias_term else value
    return view.in_shape_of(value, view.tops[0])
