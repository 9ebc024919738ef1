"""Random changes of images: NVIDIA Caffe's resize and stretch, SSD's `resize_param`, `distort_param`, `noise_param`.

Defined by NVIDIA Caffe's `data_transformer.cpp` (image_random_resize) and `im_transforms.cpp` (ApplyResize,
InferNewSize, ApplyDistort, ApplyNoise). Sizes are computed in float32 as there. The `prob` of `noise_param` has no
effect there and here.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

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


# -- distort_param -------------------------------------------------------------------------------------


Bytes = NDArray[np.uint8]


def check_distort(param: caffe_pb2.DistortionParameter, where: str) -> None:
    """Refuse ranges that are none.

    Raises:
        ConfigError: naming the field.
    """
    for name in ("brightness_delta", "hue_delta", "contrast_lower", "saturation_lower"):
        if not getattr(param, name) >= 0:
            raise ConfigError(f"{where}: distort_param.{name} is {getattr(param, name):g}; it must not be negative")
    for name in ("contrast", "saturation"):
        lower, upper = getattr(param, f"{name}_lower"), getattr(param, f"{name}_upper")
        if getattr(param, f"{name}_prob") > 0 and not upper >= lower:
            raise ConfigError(f"{where}: distort_param.{name}_upper {upper:g} is less than {name}_lower {lower:g}")


def distort(pixels: Pixels, param: caffe_pb2.DistortionParameter, draws: Draws) -> Pixels:
    """The image in other colors; in half of the images the contrast changes before saturation and hue, else after.

    Raises:
        DataError: the image has not three channels of bytes, and a change needs them.
    """
    if pixels.dtype != np.uint8:
        raise DataError("holds floats; distort_param changes the colors of bytes only")
    image = cast(Bytes, pixels)
    contrast_first = draws.uniform(0, 1) > 0.5
    if draws.uniform(0, 1) < param.brightness_prob:
        image = scale_bytes(image, 1, draws.uniform(-param.brightness_delta, param.brightness_delta))
    if contrast_first:
        image = _contrast(image, param, draws)
    if draws.uniform(0, 1) < param.saturation_prob:
        image = adjust_hsv(image, 1, draws.uniform(param.saturation_lower, param.saturation_upper), 0)
    if draws.uniform(0, 1) < param.hue_prob:
        image = _hue(image, draws.uniform(-param.hue_delta, param.hue_delta))
    if not contrast_first:
        image = _contrast(image, param, draws)
    if draws.uniform(0, 1) < param.random_order_prob:
        image = _reorder(image, draws)
    return image


def _contrast(image: Bytes, param: caffe_pb2.DistortionParameter, draws: Draws) -> Bytes:
    if not draws.uniform(0, 1) < param.contrast_prob:
        return image
    factor = draws.uniform(param.contrast_lower, param.contrast_upper)
    return scale_bytes(image, factor, 0) if abs(factor - 1) > 1e-3 else image


def _hue(image: Bytes, summand: float) -> Bytes:
    """The image itself for 0, since the way to HSV and back rounds."""
    return adjust_hsv(image, 0, 1, summand) if summand else image


def scale_bytes(image: Bytes, factor: float, summand: float) -> Bytes:
    """Each byte times a factor plus a summand in float32, rounded and saturated as by `cv::Mat::convertTo`."""
    table = np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(summand)
    return cast(Bytes, np.clip(np.rint(table), 0, 255).astype(np.uint8)[image])


def adjust_hsv(image: Bytes, channel: int, factor: float, summand: float) -> Bytes:
    """`scale_bytes` of the hue (0, in units of two degrees) or the saturation (1).

    Raises:
        DataError: the image has not three channels.
    """
    cv2 = opencv()
    hsv = np.array(call("cvtColor", image, cv2.COLOR_BGR2HSV))
    hsv[:, :, channel] = scale_bytes(hsv[:, :, channel], factor, summand)
    return cast(Bytes, call("cvtColor", hsv, cv2.COLOR_HSV2BGR))


def _reorder(image: Bytes, draws: Draws) -> Bytes:
    if image.shape[2] != 3:
        raise DataError(f"has {image.shape[2]} channels; random_order_prob needs 3")
    order = np.argsort(draws.words(3), kind="stable")
    return np.ascontiguousarray(image[:, :, order])


# -- noise_param ---------------------------------------------------------------------------------------


_STEP = 64
"""Posterizing leaves one value in so many."""
_CLIP_LIMIT = 4.0


def check_noise(param: caffe_pb2.NoiseParameter, where: str) -> None:
    """Refuse salt and pepper without values.

    Raises:
        ConfigError: naming the field.
    """
    if param.saltpepper and not param.saltpepper_param.value:
        raise ConfigError(f"{where}: noise_param.saltpepper needs saltpepper_param {{ value: ... }}")
    if param.saltpepper and not 0 <= param.saltpepper_param.fraction <= 1:
        raise ConfigError(
            f"{where}: noise_param.saltpepper_param.fraction is {param.saltpepper_param.fraction:g}, not from 0 to 1"
        )


def apply_noise(pixels: Pixels, param: caffe_pb2.NoiseParameter, draws: Draws) -> Pixels:
    """The damaged image; `convert_to_lab` makes float32 of it.

    Raises:
        DataError: OpenCV cannot do it, for example because the image has one channel.
    """
    cv2 = opencv()
    if param.decolorize:
        pixels = call("cvtColor", call("cvtColor", pixels, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    if param.gauss_blur:
        pixels = call("GaussianBlur", pixels, (7, 7), 1.5)
    if param.hist_eq:
        pixels = _on_brightness(pixels, cv2.equalizeHist)
    if param.clahe:
        pixels = _on_brightness(pixels, cv2.createCLAHE(clipLimit=_CLIP_LIMIT).apply)
    if param.jpeg > 0:
        pixels = _jpeg(pixels, int(param.jpeg))
    return _convert(_damage_bytes(pixels, param, draws), param)


def _damage_bytes(pixels: Pixels, param: caffe_pb2.NoiseParameter, draws: Draws) -> Pixels:
    cv2 = opencv()
    if param.erode:
        pixels = call("erode", pixels, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3), (1, 1)))
    if param.posterize:
        pixels = call("LUT", pixels, (np.arange(256) // _STEP * _STEP + _STEP // 2).astype(np.uint8))
    if param.inverse:
        pixels = call("bitwise_not", pixels)
    return _salt_and_pepper(pixels, param.saltpepper_param, draws) if param.saltpepper else pixels


def _convert(pixels: Pixels, param: caffe_pb2.NoiseParameter) -> Pixels:
    cv2 = opencv()
    if param.convert_to_hsv:
        pixels = call("cvtColor", pixels, cv2.COLOR_BGR2HSV)
    if param.convert_to_lab:
        pixels = call("cvtColor", pixels.astype(np.float32) * np.float32(1 / 255), cv2.COLOR_BGR2Lab)
    return pixels


def _on_brightness(pixels: Pixels, function: object) -> Pixels:
    """A function of one channel on a gray image, or on the Y of YCrCb."""
    cv2 = opencv()
    if not callable(function) or pixels.dtype != np.uint8:
        raise DataError("holds floats; hist_eq and clahe change bytes only")
    if pixels.shape[2] == 1:
        return np.atleast_3d(np.asarray(function(pixels[:, :, 0])))
    planes = np.array(call("cvtColor", pixels, cv2.COLOR_BGR2YCrCb))
    planes[:, :, 0] = function(np.ascontiguousarray(planes[:, :, 0]))
    return call("cvtColor", planes, cv2.COLOR_YCrCb2BGR)


def _jpeg(pixels: Pixels, quality: int) -> Pixels:
    """A gray image stays one: Caffe decodes three channels, but reads as many as the top has, one."""
    cv2 = opencv()
    flag = cv2.IMREAD_GRAYSCALE if pixels.shape[2] == 1 else cv2.IMREAD_COLOR
    return call("imdecode", np.asarray(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]), flag)


def _salt_and_pepper(pixels: Pixels, param: caffe_pb2.SaltPepperParameter, draws: Draws) -> Pixels:
    """So many pixels, some perhaps hit twice, get the values; as in Caffe only images of one or three channels."""
    rows, columns, channels = pixels.shape
    values = list(param.value)
    if len(values) not in (1, channels):
        raise DataError(f"has {channels} channels, but saltpepper_param has {len(values)} value; give 1 or {channels}")
    if channels not in (1, 3):
        return pixels
    count = int(np.floor(np.float32(param.fraction) * np.float32(columns) * np.float32(rows)))
    changed: Pixels = pixels.copy()
    places = draws.integers(columns, count), draws.integers(rows, count)
    changed[places[1], places[0]] = np.array(values).astype(np.int64).astype(np.uint8)
    return changed
