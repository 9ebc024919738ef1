"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import FLOAT, ONNX, TORCH, OnnxLayer

ONNX.exports("ChannelNorm", form="ReduceL2 over the channels", composite=True)(
    lambda view: view.reduce("ReduceL2", view.x, [1])
)
TORCH.exports("ChannelNorm", form="square, sum, sqrt")(lambda code: f"{code.x}.square().sum(1, keepdim=True).sqrt()")


@ONNX.exports("ExpMax", form="ReduceMax, Sub, Mul, Exp", composite=True)
def exp_max(view: OnnxLayer) -> str:
    param = view.param.expmax_param
    logarithm = 1.0 if param.base == -1 else float(np.log(param.base))
    below = view.add("Sub", view.x, view.reduce("ReduceMax", view.x, [1]))
    return view.add("Exp", view.scaled(below, logarithm * param.scale, logarithm * param.shift))


@ONNX.exports("Mean", form="Mul, Add", composite=True)
def mean(view: OnnxLayer) -> list[str]:
    results = []
    for index, value in enumerate(view.inputs):
        term = view.layer.terms(index)[:1]
        results.append(view.add("Add", view.scaled(value, view.layer.slope()), view.floats(term)))
    return results


# -- correlation ---------------------------------------------------------------------------------------


@ONNX.exports(
    "Correlation", "Correlation1D", form="for each displacement Slice, Mul, ReduceMean; Concat", composite=True
)
def correlation(view: OnnxLayer) -> str:
    window = view.layer.window
    sizes, spans = view.bottoms[0].shape[2:], view.tops[0].shape[2:]
    reach = [(span - 1) * window.stride + window.kernel for span in spans]
    shifts = [[first + k * window.step for k in range(n)] for first, n in zip(window.first, window.count, strict=True)]
    # The first image's part begins at `origin`, the second's is displaced; zeros are added where they need them.
    starts = [(0, *line) for line in shifts]
    before = [max(0, -(at + min(line))) for at, line in zip(window.origin, starts, strict=True)]
    after = [
        max(0, at + max(line) + long - size)
        for at, line, long, size in zip(window.origin, starts, reach, sizes, strict=True)
    ]
    pads = view.ints(0, 0, *before, 0, 0, *after)
    first, second = (view.add("Pad", value, pads) for value in view.inputs)
    axes = view.ints(2, 3)

    def part(value: str, down: int, right: int) -> str:
        begins = [at + pad + move for at, pad, move in zip(window.origin, before, (down, right), strict=True)]
        ends = [begin + long for begin, long in zip(begins, reach, strict=True)]
        return view.add("Slice", value, view.ints(*begins), view.ints(*ends), axes)

    left, maps = part(first, 0, 0), []
    for down, right in itertools.product(*shifts):
        moved = part(second, down, right)
        product = view.add("Abs", view.add("Sub", left, moved)) if window.subtract else view.add("Mul", left, moved)
        maps.append(view.reduce("ReduceMean", product, [1]))
    result = view.add("Concat", *maps, axis=1) if len(maps) > 1 else maps[0]
    if window.kernel == window.stride == 1:
        return result
    return view.add(
        "AveragePool", result, kernel_shape=[window.kernel] * 2, strides=[window.stride] * 2, pads=[0, 0, 0, 0]
    )


# -- sampling ------------------------------------------------------------------------------------------


def grid_of(view: OnnxLayer, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Column and row of each pixel, (1, 2, H, W)."""
    rows, columns = np.meshgrid(np.arange(shape[2]), np.arange(shape[3]), indexing="ij")
    return np.stack([columns, rows])[None].astype(np.float32)


def limits(view: OnnxLayer) -> NDArray[np.float32]:
    """Width and height of the first bottom, (1, 2, 1, 1)."""
    height, width = view.bottoms[0].shape[2:]
    return np.reshape([width, height], (1, 2, 1, 1)).astype(np.float32)


def masked(view: OnnxLayer, value: str, inside: str, fill: float) -> str:
    """The value where both coordinates are `inside`, else a constant."""
    both = view.reduce("ReduceMin", view.add("Cast", inside, to=FLOAT), [1])
    return view.add("Where", view.add("Greater", both, view.floats(0.5)), value, view.floats(fill))


@ONNX.exports("Warp", form="GridSample; displacements with Add and a mask of positions outside", composite=True)
def warp(view: OnnxLayer) -> str:
    if view.param.warp_param.positions:
        return view.sampled(view.inputs[1])
    positions = view.add("Add", view.inputs[1], view.floats(grid_of(view, view.bottoms[1].shape)))
    above = view.add("GreaterOrEqual", positions, view.floats(0))
    below = view.add("LessOrEqual", positions, view.floats(limits(view) - 1))
    return masked(view, view.sampled(positions), view.add("And", above, below), 0.0)


@ONNX.exports("FlowWarp", form="Add, Clip, GridSample, a mask of positions outside", composite=True)
def flow_warp(view: OnnxLayer) -> str:
    positions = view.add("Add", view.inputs[1], view.floats(grid_of(view, view.bottoms[1].shape)))
    above = view.add("GreaterOrEqual", positions, view.floats(0))
    below = view.add("Less", positions, view.floats(limits(view)))
    inside = view.add("Max", view.add("Min", positions, view.floats(limits(view) - 1)), view.floats(0))
    nan = view.param.flow_warp_param.fill_value == caffe_pb2.FlowWarpParameter.NOT_A_NUMBER
    return masked(view, view.sampled(inside), view.add("And", above, below), np.nan if nan else 0.0)


@ONNX.exports("Grid", form="a constant, Expand", composite=True)
def grid(view: OnnxLayer) -> str:
    shape = view.tops[0].shape
    batch = view.add("Slice", view.add("Shape", view.x), view.ints(0), view.ints(1))
    whole = view.add("Concat", batch, view.ints(*shape[1:]), axis=0)
    return view.add("Expand", view.floats(grid_of(view, shape)), whole)


# -- resizing ------------------------------------------------------------------------------------------


def resized(view: OnnxLayer, value: str) -> str:
    """A value times the matrices of both axes."""
    (height, width), (rows, columns) = view.bottoms[0].shape[2:], view.tops[0].shape[2:]
    matrices = []
    for sizes in ((height, rows, width, columns), (width, columns, height, rows)):
        places, weights = view.layer.taps(*sizes)
        matrix = np.zeros((sizes[1], sizes[0]), np.float64)
        np.add.at(matrix, (np.arange(sizes[1])[:, None], places), weights)
        matrices.append(matrix)
    value = view.add("MatMul", value, view.floats(matrices[1].T))
    return view.add("MatMul", view.floats(matrices[0]), value)


@ONNX.exports("Resample", form="MatMul along each axis", composite=True)
def resample(view: OnnxLayer) -> str:
    return resized(view, view.x)


@ONNX.exports("Downsample", form="MatMul along each axis; IsNaN and Where for missing values", composite=True)
def downsample(view: OnnxLayer) -> str:
    lost = view.add("IsNaN", view.x)
    total = resized(view, view.add("Where", lost, view.floats(0), view.x))
    present = resized(view, view.add("Cast", view.add("Not", lost), to=FLOAT))
    absent = view.add("Sub", view.floats(1), present)
    few = view.add("Greater", absent, view.add("Mul", present, view.floats(0.5)))
    return view.add("Where", few, view.floats(np.nan), view.add("Div", total, present))
