"""Convolution in both directions and InnerProduct, pooling, images of another size, and regions of images.

Caffe rounds the number of pooling windows up and cuts the last one off; explicit padding gives the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from caffepy.layers.core.unit_weights import LEAST_SQUARE
from caffepy.layers.vision.base_convolution import BaseConvolutionLayer, beyond_padding
from caffepy.layers.vision.pooling import PoolingLayer
from caffepy.layers.vision.region_mask import resize_matrix
from caffepy.layers.vision.roi_pooling import padding_map
from caffepy.onnx.export.graph import LayerView, exports, product_of
from caffepy.proto import caffe_pb2


@exports(
    "Convolution", "DepthwiseConvolution", "ConvolutionDepthwise", "Convolution3D",
    form="Conv; Reshape around it where `axis` is not 1",
)  # fmt: skip
def convolution(view: LayerView) -> list[str]:
    return _convolve(view, "Conv")


@exports("Deconvolution", "Deconvolution3D", form="ConvTranspose; Reshape around it where `axis` is not 1")
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


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling layer along the spatial axes.

    Args:
        size: of the image.
        out: how many windows.
        kernel: their size.
        stride: from one to the next.
        pad: before the image; after it as much counts for the average.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]

    @property
    def overhang(self) -> tuple[int, ...]:
        """How far the last window reaches beyond the image, 0 where it does not."""
        return tuple(
            max((out - 1) * stride + kernel - size - pad, 0)
            for size, out, kernel, stride, pad in zip(
                self.size, self.out, self.kernel, self.stride, self.pad, strict=True
            )
        )

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of ONNX, where rounding down gives the same windows with this padding."""
        return {"kernel_shape": list(self.kernel), "strides": list(self.stride), "pads": [*self.pad, *self.overhang]}

    def counts(self, axis: int, counted_pad: int) -> NDArray[np.int64]:
        """How many positions of each window lie in the image with `counted_pad` on both sides, along an axis."""
        begins = np.arange(self.out[axis]) * self.stride[axis] - self.pad[axis]
        ends = np.minimum(begins + self.kernel[axis], self.size[axis] + counted_pad)
        return ends - np.maximum(begins, -counted_pad)


@exports("Pooling", form="MaxPool, AveragePool, with Mul where the divisors differ; global ones; STOCHASTIC as ratio")
def pooling(view: LayerView) -> str | list[str]:
    param = view.param.pooling_param
    windows = windows_of(view)
    if param.pool == _Pool.MAX:
        return _maximum(view, windows)
    if param.pool == _Pool.AVE:
        return average(view, view.x, windows)
    squares = average(view, view.add("Mul", view.x, view.x), windows)
    totals = average(view, view.x, windows)
    positive = view.add("Greater", totals, view.floats(0))
    return view.add("Where", positive, view.add("Div", squares, totals), view.floats(0))


def windows_of(view: LayerView) -> Windows:
    """The windows of the layer."""
    layer = view.layer
    assert isinstance(layer, PoolingLayer)
    g = layer.geometry
    return Windows(view.bottoms[0].shape[2:], view.tops[0].shape[2:], g.kernel, g.stride, g.pad)


@exports("Pooling3D", form="MaxPool, AveragePool, with Mul where the divisors differ")
def pooling_of_clips(view: LayerView) -> str:
    from caffepy.layers.vision.convolution3d import Pooling3DLayer

    layer = view.layer
    assert isinstance(layer, Pooling3DLayer)
    g = layer.geometry
    windows = Windows(view.bottoms[0].shape[2:], view.tops[0].shape[2:], g.kernel, g.stride, g.pad)
    if layer.is_max:
        return view.add("MaxPool", view.x, **windows.attributes)
    return average(view, view.x, windows)


def _maximum(view: LayerView, windows: Windows) -> str | list[str]:
    if len(view.tops) == 1:
        if view.param.pooling_param.global_pooling:
            return view.add("GlobalMaxPool", view.x)
        return view.add("MaxPool", view.x, **windows.attributes)
    value, index = view.add_many("MaxPool", 2, view.x, **windows.attributes)
    height, width = view.bottoms[0].shape[2:]
    within = view.add("Mod", index, view.graph.constant(np.array(height * width), f"{view.layer.name}/pixels"))
    return [value, view.add("Cast", within, to=TensorProto.FLOAT)]


def average(view: LayerView, value: str, windows: Windows) -> str:
    """Caffe's average of windows, whose divisor counts padding up to `pad` on either side."""
    if max(windows.out) == 1 and not any(windows.pad) and windows.kernel == windows.size:
        return view.add("GlobalAveragePool", value)
    if not any(windows.pad):
        return view.add("AveragePool", value, **windows.attributes, count_include_pad=0)
    pooled = view.add("AveragePool", value, **windows.attributes, count_include_pad=1)
    if all(over <= pad for over, pad in zip(windows.overhang, windows.pad, strict=True)):
        return pooled
    counts = [windows.counts(axis, windows.pad[axis]) for axis in range(len(windows.pad))]
    factors = np.prod(windows.kernel) / functools.reduce(np.multiply.outer, counts)
    return view.add("Mul", pooled, view.floats(factors[None, None]))


@exports("SPP", form="MaxPool or AveragePool of each level, Flatten, Concat")
def spatial_pyramid(view: LayerView) -> str:
    from caffepy.layers.vision.spp import SPPLayer

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


@exports("Interp", form="Slice, Resize (linear, align_corners)", composite=True)
def interp(view: LayerView) -> str:
    param, value = view.param.interp_param, view.x
    height, width = view.bottoms[0].shape[2:]
    if param.pad_beg or param.pad_end:
        begin, ends = -param.pad_beg, (height + param.pad_end, width + param.pad_end)
        value = view.add("Slice", value, view.ints(begin, begin), view.ints(*ends), view.ints(2, 3))
    kept = tuple(size + param.pad_beg + param.pad_end for size in (height, width))
    wanted = view.tops[0].shape[2:]
    for axis, (size, target) in enumerate(zip(kept, wanted, strict=True), 2):
        if target == 1 and size > 1:  # the first pixel, where ONNX would divide by 0
            value = view.add("Slice", value, view.ints(0), view.ints(1), view.ints(axis))
    kept = tuple(min(size, target) if target == 1 else size for size, target in zip(kept, wanted, strict=True))
    if kept == wanted:
        return value if value != view.x else view.add("Identity", value)
    return _resized(view, value, "linear", "align_corners")


def _resized(view: LayerView, value: str, mode: str, transformation: str) -> str:
    size = view.add("Concat", _leading(view, value), view.ints(*view.tops[0].shape[2:]), axis=0)
    return view.add(
        "Resize", value, "", "", size, mode=mode, coordinate_transformation_mode=transformation, nearest_mode="floor"
    )


def _leading(view: LayerView, value: str) -> str:
    """N and C of a value, as the model runs."""
    return view.add("Slice", view.add("Shape", value), view.ints(0), view.ints(2))


@exports("Upsample", form="Resize (nearest); with a mask Reshape, ScatterElements")
def upsample(view: LayerView) -> str:
    if len(view.inputs) > 1:
        return _unpooled(view)
    return _resized(view, view.x, "nearest", "asymmetric")


def _unpooled(view: LayerView) -> str:
    from onnx import TensorProto

    height, width = view.tops[0].shape[2:]
    values, mask = (view.reshaped(value, (0, 0, -1)) for value in view.inputs)
    size = view.add("Concat", _leading(view, view.x), view.ints(height * width), axis=0)
    empty = view.add("Expand", view.floats(0), size)
    index = view.add("Cast", mask, to=TensorProto.INT64)
    return view.reshaped(view.add("ScatterElements", empty, index, values, axis=2), (0, 0, height, width))


@exports("ROIPooling", form="MaxRoiPool; pad_ratio as MatMul and Add")
def roi_pooling(view: LayerView) -> str:
    param = view.param.roi_pooling_param
    sizes = [param.pooled_h, param.pooled_w]
    regions = view.inputs[1] if len(view.bottoms[1].shape) == 2 else view.reshaped(view.inputs[1], (-1, 5))
    if param.pad_ratio:
        matrix, shift = padding_map(param.pad_ratio)
        regions = view.add("Add", view.add("MatMul", regions, view.floats(matrix)), view.floats(shift))
    return view.add("MaxRoiPool", view.x, regions, pooled_shape=sizes, spatial_scale=param.spatial_scale)


@exports("MaskPooling", form="Mul")
def mask_pooling(view: LayerView) -> str:
    return view.add("Mul", view.x, view.inputs[1])


@exports("MaskResize", form="MatMul of rows and of columns")
def mask_resize(view: LayerView) -> str:
    view.refuse_varying(view.bottoms[0], (2, 3))
    rows, columns = map(resize_matrix, view.bottoms[0].shape[2:], view.tops[0].shape[2:])
    return view.add("MatMul", view.floats(rows), view.add("MatMul", view.x, view.floats(columns.T)))


@exports("PriorBox", form="a constant")
def prior_box(view: LayerView) -> str:
    for blob in view.bottoms:
        view.refuse_varying(blob, (2, 3))
    view.layer.forward(view.bottoms, view.tops)
    boxes = np.asarray(view.tops[0].host_data())
    assert product_of(boxes.shape)
    return view.floats(boxes, "priors")
