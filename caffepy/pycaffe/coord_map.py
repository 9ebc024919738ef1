"""Coordinate maps between blobs, for nets that crop and align feature maps (pycaffe's `coord_map.py`).

A map is (axis, scale, shift): coordinate x in one blob is scale * x + shift in the other, from `axis` on, counted
without the batch axis. Scale and shift are scalars, or arrays with an element per spatial dimension. The axis is None
for the identity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.pycaffe.net_spec import Function, Top, layers

Coordinates = float | NDArray[Any]
CoordMap = tuple[int | None, Coordinates, Coordinates]

PASS_THROUGH_LAYERS = [
    "AbsVal",
    "BatchNorm",
    "Bias",
    "BNLL",
    "Dropout",
    "Eltwise",
    "ELU",
    "Log",
    "LRN",
    "Exp",
    "MVN",
    "Power",
    "ReLU",
    "PReLU",
    "Scale",
    "Sigmoid",
    "Split",
    "TanH",
    "Threshold",
]
"""Layer types with the identity map."""
_RECTANGULAR = ("pad_h", "pad_w", "kernel_h", "kernel_w", "stride_h", "stride_w")
_IDENTITY: CoordMap = (None, 1, 0)


class UndefinedMapException(Exception):  # noqa: N818 - pycaffe's name
    """The layer has no coordinate map."""


class AxisMismatchException(Exception):  # noqa: N818 - pycaffe's name
    """Two maps begin at different axes."""


def conv_params(fn: Function) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return axis, stride, dilated kernel size and pad of a layer with windows.

    Raises:
        AssertionError: the layer uses the legacy _h and _w fields.
        UndefinedMapException: it has no kernel_size, for example global pooling.
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
    """Return axis and offset of a Crop layer."""
    given = fn.params.get("crop_param", fn.params)
    return given.get("axis", 2), np.array(given.get("offset", 0), ndmin=1)


def coord_map(fn: Function) -> CoordMap:
    """Return the map from a layer's bottom to its top.

    Raises:
        UndefinedMapException: layers of this type have no map.
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
    """Return `base_map` applied after `next_map`: (axis, a1 a2, a1 b2 + b1).

    Raises:
        AxisMismatchException: the maps begin at different axes.
    """
    first, a1, b1 = base_map
    second, a2, b2 = next_map
    if first is not None and second is not None and first != second:
        raise AxisMismatchException(f"the maps begin at axes {first} and {second}")
    return (second if first is None else first), a1 * a2, a1 * b2 + b1


def inverse(coord_map: CoordMap) -> CoordMap:
    """Return the inverse map: (axis, 1 / a, -b / a)."""
    axis, a, b = coord_map
    return axis, 1 / a, -b / a


def coord_map_from_to(top_from: Top, top_to: Top) -> CoordMap:
    """Return the map between two blobs through a common ancestor.

    Raises:
        RuntimeError: no common ancestor is connected to both by layers with maps.
        AxisMismatchException: maps on the path begin at different axes.
    """
    ancestors = _maps_of_ancestors(top_from)
    for top, found in _maps_of_ancestors(top_to).items():
        if top in ancestors:
            return compose(found, inverse(ancestors[top]))
    raise RuntimeError("Could not compute map between tops; are they connected by spatial layers?")


def _maps_of_ancestors(top: Top) -> dict[Top, CoordMap]:
    """Return the maps of all ancestors of `top`, the nearest first."""
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
    """Return the bottoms that map to the top: all, but only the first of a Crop, whose second bottom gives the size."""
    return fn.inputs[:1] if fn.type_name == "Crop" else fn.inputs


def crop(top_from: Top, top_to: Top) -> Top:
    """Return a Crop layer that aligns `top_from` with `top_to`.

    Raises:
        AssertionError: the scales differ, or the offset is negative or fractional.
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
    # The map counts axes without the batch axis. The identity has no axis: use the first spatial one.
    result: Top = layers.Crop(top_from, top_to, crop_param={"axis": 2 if axis is None else axis + 1, "offset": offset})
    return result
