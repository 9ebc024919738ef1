"""How coordinates of one blob map to those of another, for nets that crop and align maps (pycaffe's `coord_map.py`).

A map is (axis, scale, shift): coordinate x of the one is scale * x + shift of the other, from `axis` on, counted
without the batch. Scale and shift are numbers, or arrays with one for each spatial dimension. The axis is None where a
layer leaves coordinates as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.pycaffe.net_spec import Function, Top, layers

Coordinates = float | NDArray[Any]
CoordMap = tuple[int | None, Coordinates, Coordinates]

PASS_THROUGH_LAYERS = [
    "AbsVal", "BatchNorm", "Bias", "BNLL", "Dropout", "Eltwise", "ELU", "Log", "LRN", "Exp", "MVN", "Power", "ReLU",
    "PReLU", "Scale", "Sigmoid", "Split", "TanH", "Threshold",
]  # fmt: skip
"""Types of layers whose tops have the coordinates of their bottoms."""
_RECTANGULAR = ("pad_h", "pad_w", "kernel_h", "kernel_w", "stride_h", "stride_w")
_IDENTITY: CoordMap = (None, 1, 0)


class UndefinedMapException(Exception):  # noqa: N818 - the name that it has in pycaffe
    """Coordinates of a layer's top say nothing about those of its bottom."""


class AxisMismatchException(Exception):  # noqa: N818 - the name that it has in pycaffe
    """Two maps begin at different axes."""


def conv_params(fn: Function) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Axis, stride, extent (the kernel with its dilation) and pad of a layer with windows.

    Raises:
        AssertionError: the layer gives heights and widths in fields of their own.
        UndefinedMapException: it has no kernel_size, as a global pooling.
    """
    given = fn.params.get("convolution_param", fn.params.get("pooling_param", fn.params))
    found = [name for name in _RECTANGULAR if name in given or name in fn.params]
    if found:
        raise AssertionError(f"cropping does not support legacy _h/_w params: {fn.type_name} has {', '.join(found)}")
    if "kernel_size" not in given:
        raise UndefinedMapException(f"the {fn.type_name} layer has no kernel_size")
    defaults = {"stride": 1, "dilation": 1, "pad": 0}
    stride, dilation, pad = (np.array(given.get(name, value), ndmin=1) for name, value in defaults.items())
    kernel = np.array(given["kernel_size"], ndmin=1)
    return given.get("axis", 1), stride, (kernel - 1) * dilation + 1, pad


def crop_params(fn: Function) -> tuple[int, NDArray[Any]]:
    """Axis and offset of a Crop layer."""
    given = fn.params.get("crop_param", fn.params)
    return given.get("axis", 2), np.array(given.get("offset", 0), ndmin=1)


def coord_map(fn: Function) -> CoordMap:
    """The map of a layer's bottom to its top.

    Raises:
        UndefinedMapException: there is none for layers of this type.
    """
    if fn.type_name in ("Convolution", "Pooling", "Im2col"):
        axis, stride, extent, pad = conv_params(fn)
        return axis, 1 / stride, (pad - (extent - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, extent, pad = conv_params(fn)
        return axis, stride, (extent - 1) / 2 - pad
    if fn.type_name == "Crop":
        axis, offset = crop_params(fn)
        return axis - 1, 1, -offset
    if fn.type_name in PASS_THROUGH_LAYERS:
        return _IDENTITY
    raise UndefinedMapException(f"layers of type {fn.type_name} have no map of coordinates")


def compose(base_map: CoordMap, next_map: CoordMap) -> CoordMap:
    """The map that `base_map` makes of what `next_map` gives: (axis, a1 a2, a1 b2 + b1).

    Raises:
        AxisMismatchException: they begin at different axes.
    """
    first, a1, b1 = base_map
    second, a2, b2 = next_map
    if first is not None and second is not None and first != second:
        raise AxisMismatchException(f"the maps begin at axes {first} and {second}")
    return (second if first is None else first), a1 * a2, a1 * b2 + b1


def inverse(coord_map: CoordMap) -> CoordMap:
    """The map backwards: (axis, 1 / a, -b / a)."""
    axis, a, b = coord_map
    return axis, 1 / a, -b / a


def coord_map_from_to(top_from: Top, top_to: Top) -> CoordMap:
    """The map between two blobs, by way of one from which both are computed.

    Raises:
        RuntimeError: there is none that layers with maps connect with both.
        AxisMismatchException: layers on the way begin at different axes.
    """
    ancestors = _maps_of_ancestors(top_from)
    for top, found in _maps_of_ancestors(top_to).items():
        if top in ancestors:
            return compose(found, inverse(ancestors[top]))
    raise RuntimeError("Could not compute map between tops; are they connected by spatial layers?")


def _maps_of_ancestors(top: Top) -> dict[Top, CoordMap]:
    """The map of each blob from which `top` is computed, the nearest first."""
    maps = {top: _IDENTITY}
    frontier = [top]
    for current in frontier:
        try:
            own = coord_map(current.fn)
        except UndefinedMapException:
            continue
        for bottom in _mapped_bottoms(current.fn):
            if bottom not in maps:
                maps[bottom] = compose(maps[current], own)
                frontier.append(bottom)
    return maps


def _mapped_bottoms(fn: Function) -> tuple[Top, ...]:
    """All bottoms; of a Crop only the first, because the second gives no more than the size."""
    return fn.inputs[:1] if fn.type_name == "Crop" else fn.inputs


def crop(top_from: Top, top_to: Top) -> Top:
    """A Crop layer that cuts out of `top_from` what lies over `top_to`.

    Raises:
        AssertionError: the blobs have other scales, or what is to be cut out begins before the blob or between pixels.
        RuntimeError, AxisMismatchException: as in `coord_map_from_to`.
    """
    axis, scale, shift = coord_map_from_to(top_from, top_to)
    if not np.all(np.equal(scale, 1)):
        raise AssertionError(f"scale mismatch on crop (a = {scale})")
    if not np.all(np.less_equal(shift, 0)):
        raise AssertionError(f"cannot crop negative offset (b = {shift})")
    if not np.all(np.equal(np.round(shift), shift)):
        raise AssertionError(f"cannot crop noninteger offset (b = {shift})")
    offset = [int(number) for number in -np.atleast_1d(np.round(shift))]
    # The map counts axes without the batch. Blobs that differ by no window have no axis: the first spatial one.
    result: Top = layers.Crop(top_from, top_to, crop_param={"axis": 2 if axis is None else axis + 1, "offset": offset})
    return result
