"""The ONNX graph while it grows, and what the function of a layer type sees of its layer.

A function takes a `LayerView`, adds nodes and returns the names of the tops' values: new ones, or values that are there
already (Split, Dropout).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from caffepy.layers import Layer
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import ONNX, OnnxView

EXPORTERS, FORMS, COMPOSITES = ONNX.functions, ONNX.forms, ONNX.composites
exports = ONNX.exports

OLDEST, DEFAULT, NEWEST = 13, 17, 21
"""Versions of ONNX's operators that can be written."""
REDUCE_AXES_ARE_INPUTS = 18
PARAMETER_NAMES = ["W", "B", "C", "D", "E", "F"]
"""Behind the layer's name, the constants that hold its parameters."""
GRID_SAMPLE, LINEAR = 16, 20
"""The first version with GridSample, and the first whose name of bilinear interpolation is linear."""


@dataclass
class Graph:
    """Nodes and constants.

    Args:
        opset: the version of the operators.
    """

    opset: int = DEFAULT
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    """The next number behind each name that `new_name` has given."""

    def new_name(self, wanted: str) -> str:
        """A name of a value or node that nothing has yet."""
        name, number = wanted, self.numbers.get(wanted, 1)
        while name in self.names:
            name, number = f"{wanted}_{number}", number + 1
        self.names.add(name)
        self.numbers[wanted] = number
        return name

    def constant(self, values: NDArray[Any], wanted: str) -> str:
        """A constant's name."""
        name = self.new_name(wanted)
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
        return name

    def add(self, where: str, operator: str, inputs: Sequence[str], count: int = 1, **attributes: Any) -> list[str]:
        """A node of a layer; its outputs' names."""
        name = self.new_name(f"{where}/{operator}")
        outputs = [self.new_name(f"{name}:{index}" if count > 1 else f"{name}:") for index in range(count)]
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name=name, **attributes))
        return outputs

    def rename(self, first: int, old: str, new: str) -> None:
        """Give a value that a node from number `first` on makes another name."""
        for node in self.nodes[first:]:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == old:
                        names[index] = new


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


@dataclass
class LayerView(OnnxView):
    """A layer with the names of its bottoms' values.

    Args:
        graph: what it is added to.
        layer: the layer, set up, with its parameters.
        inputs: the values of the bottoms.
        bottoms: with their shapes.
        tops: with their shapes.
        varying: of each blob's axes whether the size follows the batch, by the blob's name; empty: the batch is fixed.
    """

    graph: Graph
    layer: Layer
    inputs: list[str]
    bottoms: list[Blob]
    tops: list[Blob]
    varying: Mapping[str, Sequence[bool]] = field(default_factory=dict)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output; its value."""
        return self.graph.add(self.layer.name, operator, inputs, **attributes)[0]

    def add_many(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with several outputs; their values."""
        return self.graph.add(self.layer.name, operator, inputs, count, **attributes)

    def floats(self, values: Any, name: str = "constant") -> str:
        """A constant of float32."""
        return self.graph.constant(np.asarray(values, np.float32), f"{self.layer.name}/{name}")

    def ints(self, *values: int) -> str:
        """A constant of one axis of int64."""
        return self.graph.constant(np.array(values, np.int64), f"{self.layer.name}/ints")

    def parameter(self, index: int, shape: Sequence[int] | None = None) -> str:
        """A constant with a parameter's values, in another shape if one is given."""
        values = self.weights(index)
        return self.floats(values if shape is None else values.reshape(shape), PARAMETER_NAMES[index])

    def scaled(self, value: str, factor: float, term: float = 0.0) -> str:
        """value * factor + term."""
        if factor != 1:
            value = self.add("Mul", value, self.floats(factor))
        return value if term == 0 else self.add("Add", value, self.floats(term))

    def reduce(self, operator: str, value: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """A reduction over axes, as the version of the operators has it."""
        if operator == "ReduceSum" or self.graph.opset >= REDUCE_AXES_ARE_INPUTS:
            return self.add(operator, value, self.ints(*axes), keepdims=int(keepdims))
        return self.add(operator, value, axes=list(axes), keepdims=int(keepdims))

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        """The value in another shape; 0 keeps an axis, -1 is worked out."""
        return self.add("Reshape", value, self.ints(*shape))

    def windows(self, geometry: Any) -> Windows:
        """The windows of a layer with this geometry."""
        image, windows = (blob.shape[2:] for blob in (self.bottoms[0], self.tops[0]))
        return Windows(image, windows, geometry.kernel, geometry.stride, geometry.pad)

    def average(self, value: str, windows: Windows) -> str:
        """Caffe's average of windows, whose divisor counts padding up to `pad` on either side."""
        if max(windows.out) == 1 and not any(windows.pad) and windows.kernel == windows.size:
            return self.add("GlobalAveragePool", value)
        if not any(windows.pad):
            return self.add("AveragePool", value, **windows.attributes, count_include_pad=0)
        pooled = self.add("AveragePool", value, **windows.attributes, count_include_pad=1)
        if all(over <= pad for over, pad in zip(windows.overhang, windows.pad, strict=True)):
            return pooled
        counts = [windows.counts(axis, windows.pad[axis]) for axis in range(len(windows.pad))]
        factors = np.prod(windows.kernel) / functools.reduce(np.multiply.outer, counts)
        return self.add("Mul", pooled, self.floats(factors[None, None]))

    def sampled(self, positions: str) -> str:
        """The first bottom at positions (N, 2, H', W') in pixels; pixels outside are 0.

        Raises:
            ConfigError: the operators have no GridSample, or a side of the image is one pixel.
        """
        height, width = self.bottoms[0].shape[2:]
        if self.graph.opset < GRID_SAMPLE:
            raise self.error(f"needs GridSample, which ONNX has from opset {GRID_SAMPLE} on; export it with --opset")
        if min(height, width) < 2:
            raise self.error("samples an image with a side of one pixel, for which ONNX's positions are not defined")
        factors = self.floats(np.reshape([2 / (width - 1), 2 / (height - 1)], (1, 2, 1, 1)))
        scaled = self.add("Sub", self.add("Mul", positions, factors), self.floats(1))
        grid = self.add("Transpose", scaled, perm=[0, 2, 3, 1])
        mode = "linear" if self.graph.opset >= LINEAR else "bilinear"
        return self.add("GridSample", self.x, grid, align_corners=1, mode=mode, padding_mode="zeros")

    def shape_of(self, blob: Blob, what: str) -> list[int]:
        """A blob's shape for a constant, -1 where it follows the batch.

        Raises:
            ConfigError: two of its axes do.
        """
        varies = self.varying.get(blob.name, ())
        shape = [-1 if varying else size for size, varying in zip(blob.shape, varies or [False] * 32, strict=False)]
        if shape.count(-1) > 1 or (-1 in shape and 0 in shape):
            raise self.error(f"{what} depends on the batch in more than one axis; export it with --batch N")
        return shape

    def in_shape_of(self, value: str, blob: Blob) -> str:
        """The value in a blob's shape."""
        return self.reshaped(value, self.shape_of(blob, "its shape"))

    def refuse_varying(self, blob: Blob, axes: Sequence[int]) -> None:
        """Refuse sizes along axes that follow the batch, where they become constants.

        Raises:
            ConfigError: one does.
        """
        varies = self.varying.get(blob.name, ())
        if any(axis < len(varies) and varies[axis] for axis in axes):
            raise self.error(f"the size of '{blob.title}' depends on the batch; export it with --batch N")


def product_of(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
