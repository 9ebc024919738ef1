"""Pooling, whose last window Caffe rounds up and cuts off, by explicit padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from caffepy.layers.vision.pooling import PoolingLayer
from caffepy.onnx.export.graph import LayerView, exports
from caffepy.proto import caffe_pb2

_Pool = caffe_pb2.PoolingParameter


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling layer along the two spatial axes.

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
    if windows.out == (1, 1) and windows.pad == (0, 0) and windows.kernel == windows.size:
        return view.add("GlobalAveragePool", value)
    if windows.pad == (0, 0):
        return view.add("AveragePool", value, **windows.attributes, count_include_pad=0)
    pooled = view.add("AveragePool", value, **windows.attributes, count_include_pad=1)
    if all(over <= pad for over, pad in zip(windows.overhang, windows.pad, strict=True)):
        return pooled
    counts = [windows.counts(axis, windows.pad[axis]) for axis in range(2)]
    factors = np.prod(windows.kernel) / np.outer(*counts)
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
