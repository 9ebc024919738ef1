"""Pooling: Caffe's windows and divisors so chosen that the numbers are ONNX's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caffepy.onnx.importer.builder import Tensor, UnsupportedError
from caffepy.onnx.importer.convolution import spatial_pads, window
from caffepy.onnx.importer.node import Array, NodeView, imports
from caffepy.proto import caffe_pb2

_Pool = caffe_pb2.PoolingParameter


@dataclass(frozen=True)
class _Axis:
    """Windows along one axis: ONNX's, and the padding on both sides that Caffe is given."""

    size: int
    kernel: int
    stride: int
    before: int
    behind: int
    ceil: bool

    @property
    def wanted(self) -> int:
        """How many windows ONNX has; with ceil_mode none that begins in the padding behind the image."""
        span = self.size + self.before + self.behind - self.kernel
        count = (-(-span // self.stride) if self.ceil else span // self.stride) + 1
        return count - 1 if self.ceil and (count - 1) * self.stride >= self.size + self.before else count

    def caffe(self, ceil: bool) -> int:
        """How many Caffe has with `before` on both sides."""
        span = self.size + 2 * self.before - self.kernel
        count = (-(-span // self.stride) if ceil else span // self.stride) + 1
        return count - 1 if self.before and (count - 1) * self.stride >= self.size + self.before else count

    def counts(self, before: int, behind: int) -> Array:
        """How many positions of each window lie between `before` zeros before and `behind` behind the image."""
        begins = np.arange(self.wanted) * self.stride - self.before
        return np.minimum(begins + self.kernel, self.size + behind) - np.maximum(begins, -before)


@imports("MaxPool", form="Pooling (MAX), rounded as needed; Slice where Caffe has more windows")
def max_pool(view: NodeView) -> Tensor:
    if len(view.node.output) > 1 and view.node.output[1]:
        raise UnsupportedError("its second output, the indices, is not imported")
    return _pooled(view, _Pool.MAX)


@imports("AveragePool", form="Pooling (AVE), rounded as needed; Scale where the divisors differ, Slice as for MaxPool")
def average_pool(view: NodeView) -> Tensor:
    return _pooled(view, _Pool.AVE)


def _pooled(view: NodeView, method: int) -> Tensor:
    x = view.blob(0)
    if len(x.shape) == 3:
        image = view.net.reshaped(x, (*x.shape, 1), f"{view.name}/image")
        y = _pool_image(view, image, method, 1)
        return view.net.reshaped(y, y.shape[:3], f"{view.name}/row")
    if len(x.shape) == 5 and _is_flat(view):
        image = view.net.reshaped(x, (*x.shape[:3], x.shape[3] * x.shape[4]), f"{view.name}/image")
        y = _pool_image(view, image, method, 1)
        return view.net.reshaped(y, (*y.shape[:3], *x.shape[3:]), f"{view.name}/volume")
    if len(x.shape) != 4:
        raise UnsupportedError(f"its image has {len(x.shape) - 2} spatial axes; Caffe pools over two")
    return _pool_image(view, x, method, 2)


def _is_flat(view: NodeView) -> bool:
    """Whether windows over three axes are of one element along the last two."""
    kernel, pads = view.numbers("kernel_shape", None, 3), view.numbers("pads", [0] * 6, 6)
    strides = view.numbers("strides", [1] * 3, 3)
    return kernel[1:] == strides[1:] == [1, 1] and not any(pads[axis] for axis in (1, 2, 4, 5))


def _pool_image(view: NodeView, x: Tensor, method: int, axes: int) -> Tensor:
    one, two = _axes(view, x, axes)
    ceil = _rounding(one, two)
    field: dict[str, object] = {"pool": method} | _pair("kernel", one.kernel, two.kernel)
    field |= _pair("stride", one.stride, two.stride) if (one.stride, two.stride) != (1, 1) else {}
    field |= _pair("pad", one.before, two.before) if (one.before, two.before) != (0, 0) else {}
    field |= {} if ceil else {"round_mode": _Pool.FLOOR}
    y = view.add("Pooling", [x], pooling_param=field)
    for axis, side in enumerate((one, two), 2):
        y = view.net.sliced(y, axis, 0, side.wanted, f"{view.name}/cut{axis}")
    return y if method == _Pool.MAX else _with_divisor(view, y, (one, two))


def _axes(view: NodeView, x: Tensor, axes: int) -> tuple[_Axis, _Axis]:
    """The windows along both axes of an image; of those that the node has, only the first `axes` count."""
    kernel = view.numbers("kernel_shape")
    if len(kernel) < axes:
        raise UnsupportedError(f"its kernel {kernel} has too few axes")
    strides, dilations = window(view, kernel)
    if max(dilations) > 1:
        raise UnsupportedError(f"its dilations are {dilations}; Caffe's pooling has none")
    sizes = [*x.shape[2 : 2 + axes], *[1] * (len(kernel) - axes)]
    pads = spatial_pads(view, sizes, kernel, strides)
    ceil = bool(view.number("ceil_mode", 0)) and view.attribute("auto_pad", "NOTSET") == "NOTSET"
    found = [_Axis(n, k, s, a, b, ceil) for n, k, s, (a, b) in zip(sizes[:axes], kernel, strides, pads, strict=False)]
    if axes == 1:
        found.append(_Axis(x.shape[3], 1, 1, 0, 0, False))
    if any(axis.before >= axis.kernel or axis.wanted < 1 for axis in found):
        raise UnsupportedError(f"its pads {pads} reach beyond its kernel {kernel}, or its image is too small")
    return found[0], found[1]


def _rounding(one: _Axis, two: _Axis) -> bool:
    """Whether to round up: where both ways have the windows, up, which is Caffe's default.

    Raises:
        UnsupportedError: neither way has all windows.
    """
    axes = (one, two)
    for exact in (True, False):
        for ceil in (True, False):
            counts = [axis.caffe(ceil) for axis in axes]
            good = [c == a.wanted if exact else c >= a.wanted for c, a in zip(counts, axes, strict=True)]
            starts = [(c - 1) * a.stride - a.before < a.size for c, a in zip(counts, axes, strict=True)]
            if all(good) and all(starts):
                return ceil
    raise UnsupportedError("its padding behind the image is so large that Caffe's pooling has fewer windows")


def _pair(name: str, height: int, width: int) -> dict[str, object]:
    if height == width:
        return {"kernel_size" if name == "kernel" else name: height}
    return {f"{name}_h": height, f"{name}_w": width}


def _with_divisor(view: NodeView, y: Tensor, axes: Sequence[_Axis]) -> Tensor:
    """The averages times Caffe's divisor over ONNX's, where they differ somewhere."""
    padded = bool(view.number("count_include_pad", 0))
    caffe = np.outer(*(axis.counts(axis.before, axis.before) for axis in axes))
    onnx = np.outer(*(axis.counts(axis.before, axis.behind) if padded else axis.counts(0, 0) for axis in axes))
    if np.array_equal(caffe, onnx):
        return y
    factors = (caffe / np.maximum(onnx, 1)).astype(np.float32)
    return view.net.add("Scale", [y], f"{view.name}/divisor", [factors], scale_param={"axis": 2, "num_axes": 2})


def global_pool(view: NodeView, x: Tensor, method: int) -> Tensor:
    """One window over the whole image (N, C, H, W)."""
    return view.add("Pooling", [x], pooling_param={"pool": method, "global_pooling": True})


@imports("GlobalAveragePool", "GlobalMaxPool", form="Pooling with global_pooling")
def whole_image(view: NodeView) -> Tensor:
    x, method = view.blob(0), _Pool.MAX if view.node.op_type == "GlobalMaxPool" else _Pool.AVE
    if len(x.shape) < 3:
        raise UnsupportedError("its image has no spatial axes")
    image = view.net.reshaped(x, (*x.shape[:3], int(np.prod(x.shape[3:]))), f"{view.name}/image")
    y = global_pool(view, image, method)
    return view.net.reshaped(y, (*x.shape[:2], *(1,) * (len(x.shape) - 2)), f"{view.name}/pixel")


@imports("MaxRoiPool", form="ROIPooling")
def roi_pool(view: NodeView) -> Tensor:
    height, width = view.numbers("pooled_shape", None, 2)
    field = {"pooled_h": height, "pooled_w": width, "spatial_scale": view.real("spatial_scale", 1.0)}
    return view.add("ROIPooling", [view.blob(0), view.blob(1)], roi_pooling_param=field)
