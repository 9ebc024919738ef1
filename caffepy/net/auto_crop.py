"""The offsets of AutoCrop layers, from the windows on the two ways from a common blob (`coords.hpp` of old Caffes).

A map of one axis is (scale, shift): position p of one blob lies over scale * p + shift of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2

Map = tuple[Fraction, Fraction]
Maps = tuple[Map, Map]
"""Of height and width."""

IDENTITY: Maps = ((Fraction(1), Fraction(0)),) * 2
_WINDOWS = ("Convolution", "ConvolutionDepthwise", "DepthwiseConvolution", "Im2col", "Pooling")


def resolve_auto_crops(param: caffe_pb2.NetParameter) -> None:
    """Set crop_param's offsets of the net's AutoCrop layers, in place.

    Raises:
        ConfigError: the two bottoms of an AutoCrop have no common blob, or the offset is negative or fractional.
    """
    if all(layer.type != "AutoCrop" for layer in param.layer):
        return
    writers: dict[str, caffe_pb2.LayerParameter] = {}
    for layer in param.layer:
        if layer.type == "AutoCrop" and not layer.crop_param.offset:
            layer.crop_param.axis = 2
            layer.crop_param.offset.extend(_offsets(layer, writers))
        for top in layer.top:
            writers.setdefault(top, layer)


def _offsets(layer: caffe_pb2.LayerParameter, writers: dict[str, caffe_pb2.LayerParameter]) -> list[int]:
    where = f"layer '{layer.name}' (AutoCrop)"
    if len(layer.bottom) != 2:
        raise ConfigError(f"{where}: needs two bottoms, the blob to crop and the blob that gives the size")
    first, second = ([bottom, *_ancestors(bottom, writers)] for bottom in layer.bottom)
    common = next((blob for blob in second if blob in first), None)
    if common is None:
        raise ConfigError(f"{where}: '{layer.bottom[0]}' and '{layer.bottom[1]}' come from no common blob")
    ours, theirs = (_from(path[: path.index(common)], writers, where) for path in (first, second))
    found = []
    for (scale, shift), (other_scale, other_shift) in zip(ours, theirs, strict=True):
        offset = other_scale * shift / scale - other_shift
        if other_scale != scale or offset < 0 or offset.denominator != 1:
            raise ConfigError(
                f"{where}: '{layer.bottom[0]}' has {float(scale / other_scale):g} pixels for each of "
                f"'{layer.bottom[1]}' and an offset of {float(offset):g}; a crop needs 1 and a whole offset from 0 on"
            )
        found.append(int(offset))
    return found


def _ancestors(blob: str, writers: dict[str, caffe_pb2.LayerParameter]) -> list[str]:
    """Return the first bottoms on the way from a blob to the net's input."""
    found: list[str] = []
    while blob in writers and writers[blob].bottom and writers[blob].bottom[0] not in (blob, *found):
        blob = writers[blob].bottom[0]
        found.append(blob)
    return found


def _from(path: Sequence[str], writers: dict[str, caffe_pb2.LayerParameter], where: str) -> Maps:
    """Return the maps from the common blob to the beginning of a path."""
    maps = IDENTITY
    for blob in path:
        own = _maps_of(writers[blob], where)
        maps = tuple((a * c, a * d + b) for (a, b), (c, d) in zip(maps, own, strict=True))  # type: ignore[assignment]
    return maps


def _maps_of(layer: caffe_pb2.LayerParameter, where: str) -> Maps:
    """Return the maps from a layer's bottom to its top."""
    if layer.type in (*_WINDOWS, "Deconvolution"):
        pooling = layer.type == "Pooling"
        windows = [_window(layer.pooling_param if pooling else layer.convolution_param, axis) for axis in (0, 1)]
        if pooling and layer.pooling_param.global_pooling:
            raise ConfigError(f"{where}: global pooling in layer '{layer.name}' has no offset")
        maps = tuple((Fraction(stride), Fraction(extent - 1, 2) - pad) for extent, stride, pad in windows)
        if layer.type != "Deconvolution":
            maps = tuple((1 / scale, -shift / scale) for scale, shift in maps)
        return maps  # type: ignore[return-value]
    if layer.type in ("Crop", "AutoCrop"):
        offsets = list(layer.crop_param.offset) or [0]
        pair = (offsets[-2] if len(offsets) > 1 else offsets[0], offsets[-1])
        return (Fraction(1), Fraction(-pair[0])), (Fraction(1), Fraction(-pair[1]))
    return IDENTITY


def _window(param: caffe_pb2.ConvolutionParameter | caffe_pb2.PoolingParameter, axis: int) -> tuple[int, int, int]:
    """Return extent, stride and pad of a window along one axis."""
    kernel, stride, pad = (
        _one(param, name, f"{short}_{'hw'[axis]}", axis, default)
        for name, short, default in (("kernel_size", "kernel", 1), ("stride", "stride", 1), ("pad", "pad", 0))
    )
    dilation = 1
    if isinstance(param, caffe_pb2.ConvolutionParameter):
        dilation = _one(param, "dilation", f"hole_{'hw'[axis]}", axis, param.hole)
    return (kernel - 1) * dilation + 1, stride, pad


def _one(
    param: caffe_pb2.ConvolutionParameter | caffe_pb2.PoolingParameter, name: str, own: str, axis: int, default: int
) -> int:
    """Return a setting of one axis: its own field, else the common one."""
    if param.HasField(own):
        return int(getattr(param, own))
    value = getattr(param, name)
    if isinstance(value, int):
        return value
    values = list(value)
    return int(values[min(axis, len(values) - 1)]) if values else default
