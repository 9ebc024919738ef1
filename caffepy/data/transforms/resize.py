"""New sizes of images: NVIDIA Caffe's random resize and stretch, and SSD's `resize_param`.

Defined by NVIDIA Caffe's `data_transformer.cpp` (image_random_resize) and `im_transforms.cpp` (ApplyResize,
InferNewSize). Sizes are computed in float32 as there.
"""

from __future__ import annotations

import math

import numpy as np

from caffepy.data.images.datum import opencv
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Pixels, call, resize
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

Resize = caffe_pb2.ResizeParameter
_f32 = np.float32
_RANDOM_FIELDS = (
    "rand_resize_ratio_lower", "rand_resize_ratio_upper", "vertical_stretch_lower", "vertical_stretch_upper",
    "horizontal_stretch_lower", "horizontal_stretch_upper",
)  # fmt: skip
_INTERPOLATIONS = {
    Resize.LINEAR: "INTER_LINEAR",
    Resize.AREA: "INTER_AREA",
    Resize.NEAREST: "INTER_NEAREST",
    Resize.CUBIC: "INTER_CUBIC",
    Resize.LANCZOS4: "INTER_LANCZOS4",
}
_BORDERS = {
    Resize.CONSTANT: "BORDER_CONSTANT",
    Resize.MIRRORED: "BORDER_REFLECT_101",
    Resize.REPEAT_NEAREST: "BORDER_REPLICATE",
}
_MOST = 1 << 16
"""Pixels of a side: OpenCV's own limit of most operations is not far."""


# -- the random resize of NVIDIA Caffe -------------------------------------------------------------------


def resizes_randomly(param: caffe_pb2.TransformationParameter) -> bool:
    """Whether a field of the random resize or stretch is given."""
    given = any(param.HasField(field) for field in _RANDOM_FIELDS)
    return bool(param.img_rand_resize_lower or param.img_rand_resize_upper or given)


def check_random_resize(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse bounds that contradict each other.

    Raises:
        ConfigError: naming the fields.
    """
    lower, upper = param.img_rand_resize_lower, param.img_rand_resize_upper
    if lower and upper < lower:
        raise ConfigError(
            f"{where}: transform_param.img_rand_resize_lower {lower} is more than img_rand_resize_upper {upper}; "
            "set both, the lower one first"
        )
    for name in ("img_rand_resize_lower", "img_rand_resize_upper"):
        if getattr(param, name) > _MOST:
            raise ConfigError(f"{where}: transform_param.{name} {getattr(param, name)} is more than {_MOST} pixels")
    for name in _RANDOM_FIELDS:
        value = getattr(param, name)
        if not 0 <= value <= _MOST:
            raise ConfigError(f"{where}: transform_param.{name} is {value:g}; give a factor from 0 to {_MOST}")


def random_size(
    param: caffe_pb2.TransformationParameter, height: int, width: int, least: tuple[int, int], draws: Draws
) -> tuple[int, int]:
    """The height and width that an image of height x width gets.

    The shorter side becomes a random one of img_rand_resize_lower to _upper and the other follows; then the longer one
    becomes the shorter times a random one of rand_resize_ratio_lower to _upper; then both are stretched.

    Args:
        param: the fields.
        height: of the image.
        width: of the image.
        least: height and width of the crop; neither side becomes smaller.
        draws: the sample's random numbers.
    """
    shorter = min(height, width)
    lower, upper = param.img_rand_resize_lower, param.img_rand_resize_upper
    if lower and upper:
        shorter = lower + draws.below(upper - lower + 1)
    scale = _f32(shorter) / _f32(height if width >= height else width)
    new_height, new_width = scale * _f32(height), scale * _f32(width)
    if param.rand_resize_ratio_lower >= 1 and param.rand_resize_ratio_upper > 1:
        ratio = _f32(draws.uniform(*sorted((param.rand_resize_ratio_lower, param.rand_resize_ratio_upper))))
        if new_width > new_height or (new_width == new_height and draws.below(2)):
            new_width = new_height * ratio
        else:
            new_height = new_width * ratio
    new_height *= _stretch(param.vertical_stretch_lower, param.vertical_stretch_upper, draws)
    new_width *= _stretch(param.horizontal_stretch_lower, param.horizontal_stretch_upper, draws)
    rows, columns = max(least[0], _rounded(new_height)), max(least[1], _rounded(new_width))
    return (rows, columns) if param.allow_upscale else (min(rows, height), min(columns, width))


def _stretch(lower: float, upper: float, draws: Draws) -> np.float32:
    factor: np.float32 = _f32(draws.uniform(*sorted((lower, upper))) if lower > 0 and upper > 0 else 1)
    return factor


def _rounded(size: np.float32) -> int:
    """As C's lround: halves away from 0."""
    return math.floor(float(size) + 0.5)


def random_resize(
    pixels: Pixels, param: caffe_pb2.TransformationParameter, least: tuple[int, int], draws: Draws
) -> Pixels:
    """An image in a random size; `least` as in `random_size`."""
    height, width = pixels.shape[:2]
    new_height, new_width = random_size(param, height, width, least, draws)
    if (new_height, new_width) == (height, width):
        return pixels
    if max(new_height, new_width) > _MOST:
        raise DataError(f"is {height} x {width} and would be resized to {new_height} x {new_width}")
    smaller = new_height <= height and new_width <= width
    return resize(
        pixels, new_height, new_width, param.interpolation_algo_down if smaller else param.interpolation_algo_up
    )


# -- SSD's resize_param ----------------------------------------------------------------------------------


def check_resize(param: caffe_pb2.ResizeParameter, where: str) -> None:
    """Refuse a resize without a size.

    Raises:
        ConfigError: naming the field.
    """
    if not (0 < param.height <= _MOST and 0 < param.width <= _MOST):
        raise ConfigError(
            f"{where}: resize_param needs height and width from 1 to {_MOST}, not {param.height} and {param.width}"
        )


def apply_resize(pixels: Pixels, param: caffe_pb2.ResizeParameter, draws: Draws) -> Pixels:
    """The image in the size and by the mode of `resize_param`; `prob` has no effect, as in Caffe.

    Raises:
        DataError: the number of pad values does not fit, or a side would be 0.
    """
    height, width = param.height, param.width
    modes = param.interp_mode
    mode = modes[draws.below(len(modes))] if modes else Resize.LINEAR
    interpolation: int = getattr(opencv(), _INTERPOLATIONS[mode])
    if param.resize_mode == Resize.WARP:
        return resize(pixels, height, width, interpolation)
    new_height, new_width = _keeping_the_ratio(pixels, param)
    resized = resize(pixels, new_height, new_width, interpolation)
    if param.resize_mode == Resize.FIT_SMALL_SIZE:
        return resized
    top, left = (height - new_height) // 2, (width - new_width) // 2
    borders = (top, height - new_height - top, left, width - new_width - left)
    border: int = getattr(opencv(), _BORDERS[param.pad_mode])
    return call("copyMakeBorder", resized, *borders, border, value=_pad_value(param, pixels.shape[2]))


def _keeping_the_ratio(pixels: Pixels, param: caffe_pb2.ResizeParameter) -> tuple[int, int]:
    """Height and width of an image that keeps its ratio: within param's size, or, for FIT_SMALL_SIZE, around it."""
    height, width = param.height, param.width
    own, wanted = _f32(pixels.shape[1]) / _f32(pixels.shape[0]), _f32(width) / _f32(height)
    by_width = own < wanted if param.resize_mode == Resize.FIT_SMALL_SIZE else own > wanted
    new_height, new_width = (
        (math.floor(_f32(width) / own), width) if by_width else (height, math.floor(own * _f32(height)))
    )
    if max(new_height, new_width) > _MOST:
        raise DataError(f"is {pixels.shape[0]} x {pixels.shape[1]} and would be resized to {new_height} x {new_width}")
    return new_height, new_width


def _pad_value(param: caffe_pb2.ResizeParameter, channels: int) -> tuple[float, ...]:
    values = list(param.pad_value)
    if len(values) not in (0, 1, channels):
        raise DataError(f"has {channels} channels, but resize_param has {len(values)} pad_value; give 1 or {channels}")
    return tuple((values * 3 if len(values) == 1 else values)[:3]) or (0.0, 0.0, 0.0)
