"""Resize and Upsample: a whole factor as Deconvolution, corners that stay as Interp, all else as a product by axis."""

from __future__ import annotations

import math

import numpy as np

from caffepy.onnx.importer.builder import Tensor, UnsupportedError
from caffepy.onnx.importer.node import Array, NodeView, imports

LARGEST_SIDE = 2**14


@imports(
    "Resize", "Upsample",
    form="Deconvolution of ones (nearest, whole factors), Interp (linear, align_corners), else InnerProduct by axis",
)  # fmt: skip
def resize(view: NodeView) -> Tensor:
    x = view.blob()
    if len(x.shape) != 4:
        raise UnsupportedError("it resizes something else than an image (N, C, H, W)")
    scales, sizes = _target(view, x)
    if sizes[:2] != x.shape[:2]:
        raise UnsupportedError("it resizes the batch or the channels")
    if sizes == x.shape:
        return x
    mode, how = view.attribute("mode", "nearest"), _transformation(view)
    factor = sizes[2] // x.shape[2]
    whole = all(n == factor * old for n, old in zip(sizes[2:], x.shape[2:], strict=True))
    if mode == "nearest" and whole and how in ("asymmetric", "half_pixel") and _repeats(view, how, factor):
        return _repeated(view, x, factor)
    if mode == "linear" and how == "align_corners":
        return view.add("Interp", [x], interp_param={"height": sizes[2], "width": sizes[3]})
    return _by_products(view, x, scales, sizes)


def _target(view: NodeView, x: Tensor) -> tuple[list[float], tuple[int, ...]]:
    """The scale and the size of each axis."""
    if view.has(2) and view.constant(2).size or view.node.op_type == "Upsample":
        given = view.constant(1 if view.node.op_type == "Upsample" else 2).reshape(-1)
    elif view.has(3):
        whole = view.whole_numbers(3)
        sizes = _placed(view, [float(n) for n in whole], [float(n) for n in x.shape])
        return [a / b for a, b in zip(sizes, x.shape, strict=True)], _checked([int(n) for n in sizes])
    else:
        raise UnsupportedError("it has neither scales nor sizes")
    scales = _placed(view, [float(v) for v in given[:8]], [1.0] * 4)
    if not all(0 < scale < LARGEST_SIDE for scale in scales):
        raise UnsupportedError(f"its scales are {scales}")
    return scales, _checked([math.floor(size * scale) for size, scale in zip(x.shape, scales, strict=True)])


def _placed(view: NodeView, values: list[float], default: list[float]) -> list[float]:
    """Values for some axes among those for all."""
    axes = view.attribute("axes")
    if axes is not None:
        for axis, value in zip(axes, values, strict=False):
            default[view.axis(axis, 4)] = value
        return default
    if len(values) != 4:
        raise UnsupportedError(f"it has {len(values)} scales or sizes for 4 axes")
    return values


def _checked(sizes: list[int]) -> tuple[int, ...]:
    if any(size < 1 for size in sizes) or max(sizes[2:]) > LARGEST_SIDE:
        raise UnsupportedError(f"it makes the size {sizes}; sides of 1 to {LARGEST_SIDE} are possible")
    return tuple(sizes)


def _transformation(view: NodeView) -> str:
    if view.node.op_type == "Upsample" or view.opset < 11:
        return "asymmetric"
    return str(view.attribute("coordinate_transformation_mode", "half_pixel"))


def _repeats(view: NodeView, how: str, factor: int) -> bool:
    """Whether the nearest pixel of each group of `factor` is the one it came from."""
    at = _positions(how, factor * 3, 3, float(factor))
    nearest = _nearest(view, at)
    return bool(np.array_equal(np.clip(nearest, 0, 2), np.arange(3 * factor) // factor))


def _repeated(view: NodeView, x: Tensor, factor: int) -> Tensor:
    channels = x.shape[1]
    field = {"num_output": channels, "group": channels, "bias_term": False, "kernel_size": [factor], "stride": [factor]}
    return view.add("Deconvolution", [x], [np.ones((channels, 1, factor, factor))], convolution_param=field)


def _by_products(view: NodeView, x: Tensor, scales: list[float], sizes: tuple[int, ...]) -> Tensor:
    """Rows and then columns as sums of the old ones."""
    net, name = view.net, view.name
    for axis in (3, 2):
        if sizes[axis] == x.shape[axis]:
            continue
        weights = _weights(view, x.shape[axis], sizes[axis], scales[axis])
        order = [0, 1, 2, 3] if axis == 3 else [0, 1, 3, 2]
        x = net.permuted(x, order, f"{name}/order{axis}")
        field = {"num_output": sizes[axis], "bias_term": False, "axis": 3}
        x = net.add("InnerProduct", [x], f"{name}/axis{axis}", [weights], inner_product_param=field)
        x = net.permuted(x, order, f"{name}/back{axis}")
    return x


def _positions(how: str, target: int, size: int, scale: float) -> Array:
    """Where each new pixel lies among the old ones."""
    new = np.arange(target, dtype=np.float64)
    if how == "asymmetric":
        return new / scale
    if how == "align_corners":
        return new * (size - 1) / (target - 1) if target > 1 else np.zeros(1)
    if how == "pytorch_half_pixel" and target == 1:
        return np.zeros(1)
    if how not in ("half_pixel", "pytorch_half_pixel"):
        raise UnsupportedError(f"its coordinate_transformation_mode {how:.40} is not imported")
    return (new + 0.5) / scale - 0.5


def _nearest(view: NodeView, at: Array) -> Array:
    mode = view.attribute("nearest_mode", "round_prefer_floor")
    if view.node.op_type == "Upsample" or view.opset < 11 or mode == "floor":
        return np.floor(at).astype(np.int64)
    if mode == "ceil":
        return np.ceil(at).astype(np.int64)
    shift = np.ceil(at - 0.5) if mode == "round_prefer_floor" else np.floor(at + 0.5)
    return np.asarray(shift).astype(np.int64)


def _weights(view: NodeView, size: int, target: int, scale: float) -> Array:
    """(target, size): how much of each old pixel each new one has."""
    if view.number("antialias", 0) or view.number("exclude_outside", 0):
        raise UnsupportedError("antialias and exclude_outside are not imported")
    at, mode = _positions(_transformation(view), target, size, scale), view.attribute("mode", "nearest")
    rows, weights = np.arange(target), np.zeros((target, size))
    if mode == "nearest":
        weights[rows, np.clip(_nearest(view, at), 0, size - 1)] = 1
        return weights
    if mode not in ("linear", "cubic"):
        raise UnsupportedError(f"its mode {mode:.40} is not imported")
    first = np.floor(at).astype(np.int64)
    for offset, part in _kernel(view, mode, at - first):
        np.add.at(weights, (rows, np.clip(first + offset, 0, size - 1)), part)
    return weights


def _kernel(view: NodeView, mode: str, share: Array) -> list[tuple[int, Array]]:
    """The old pixels around each new one, from the one before it on, with their parts."""
    if mode == "linear":
        return [(0, 1 - share), (1, share)]
    a = view.real("cubic_coeff_a", -0.75)
    near = [((a + 2) * t - (a + 3)) * t * t + 1 for t in (share, 1 - share)]
    far = [((a * t - 5 * a) * t + 8 * a) * t - 4 * a for t in (1 + share, 2 - share)]
    return [(-1, far[0]), (0, near[0]), (1, near[1]), (2, far[1])]
