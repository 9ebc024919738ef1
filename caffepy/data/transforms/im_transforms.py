"""Random image transformations: NVIDIA's resize and stretch, Intel's resizes, SSD's resize, distortion and noise.

Defined by NVIDIA Caffe's `data_transformer.cpp` (image_random_resize) and `im_transforms.cpp` (ApplyResize,
InferNewSize, ApplyDistort, ApplyNoise), and by Intel Caffe's `data_transformer.cpp` (RandomResizeImage,
RandomAlterAspectRatio). Sizes are computed in float32 as there. The `prob` of `noise_param` has no effect there and
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import Pixels, call_opencv, decode, encode, opencv, resize
from caffepy.data.random import SampleRng
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2

Resize = caffe_pb2.ResizeParameter
_f32 = np.float32
_RANDOM_FIELDS = (
    "rand_resize_ratio_lower",
    "rand_resize_ratio_upper",
    "vertical_stretch_lower",
    "vertical_stretch_upper",
    "horizontal_stretch_lower",
    "horizontal_stretch_upper",
)
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
_MAX_SIDE = 1 << 16
"""Maximum pixels of a side, close to OpenCV's limit in most operations."""
_MAX_PROB_ERROR = 0.01
"""Largest distance of the sum of several `prob` from 1, as in MobileNet-YOLO."""


# -- the random resize of NVIDIA Caffe -------------------------------------------------------------------


def resizes_randomly(param: caffe_pb2.TransformationParameter) -> bool:
    """Return whether a field of the random resize or stretch is set."""
    has_field = any(param.HasField(field) for field in _RANDOM_FIELDS)
    return bool(param.img_rand_resize_lower or param.img_rand_resize_upper or has_field)


def check_random_resize(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse contradictory bounds.

    Raises:
        ConfigError: the message names the field.
    """
    lower, upper = param.img_rand_resize_lower, param.img_rand_resize_upper
    if lower and upper < lower:
        raise ConfigError(
            f"{where}: transform_param.img_rand_resize_lower {lower} is more than img_rand_resize_upper {upper}; "
            "set both, the lower one first"
        )
    for name in ("img_rand_resize_lower", "img_rand_resize_upper"):
        if getattr(param, name) > _MAX_SIDE:
            raise ConfigError(f"{where}: transform_param.{name} {getattr(param, name)} is more than {_MAX_SIDE} pixels")
    for name in _RANDOM_FIELDS:
        value = getattr(param, name)
        if not 0 <= value <= _MAX_SIDE:
            raise ConfigError(f"{where}: transform_param.{name} is {value:g}; give a factor from 0 to {_MAX_SIDE}")


def random_size(
    param: caffe_pb2.TransformationParameter, height: int, width: int, min_size: tuple[int, int], rng: SampleRng
) -> tuple[int, int]:
    """Return a random height and width for an image of height x width.

    The shorter side is drawn from img_rand_resize_lower to _upper, and the other side keeps the ratio. Then the longer
    side is the shorter side times a draw from rand_resize_ratio_lower to _upper. Then both sides are stretched.
    """
    shorter = min(height, width)
    lower, upper = param.img_rand_resize_lower, param.img_rand_resize_upper
    if lower and upper:
        shorter = lower + rng.below(upper - lower + 1)
    scale = _f32(shorter) / _f32(height if width >= height else width)
    new_height, new_width = scale * _f32(height), scale * _f32(width)
    if param.rand_resize_ratio_lower >= 1 and param.rand_resize_ratio_upper > 1:
        ratio = _f32(rng.uniform(*sorted((param.rand_resize_ratio_lower, param.rand_resize_ratio_upper))))
        if new_width > new_height or (new_width == new_height and rng.below(2)):
            new_width = new_height * ratio
        else:
            new_height = new_width * ratio
    new_height *= _stretch(param.vertical_stretch_lower, param.vertical_stretch_upper, rng)
    new_width *= _stretch(param.horizontal_stretch_lower, param.horizontal_stretch_upper, rng)
    rows, columns = max(min_size[0], _rounded(new_height)), max(min_size[1], _rounded(new_width))
    return (rows, columns) if param.allow_upscale else (min(rows, height), min(columns, width))


def _stretch(lower: float, upper: float, rng: SampleRng) -> np.float32:
    factor: np.float32 = _f32(rng.uniform(*sorted((lower, upper))) if lower > 0 and upper > 0 else 1)
    return factor


def _rounded(size: np.float32) -> int:
    """Round a positive size as C's lround."""
    return math.floor(float(size) + 0.5)


def random_resize(
    pixels: Pixels, param: caffe_pb2.TransformationParameter, min_size: tuple[int, int], rng: SampleRng
) -> Pixels:
    """Resize an image to a `random_size`; `min_size` as there."""
    height, width = pixels.shape[:2]
    new_height, new_width = random_size(param, height, width, min_size, rng)
    if (new_height, new_width) == (height, width):
        return pixels
    if max(new_height, new_width) > _MAX_SIDE:
        raise DataError(f"is {height} x {width} and would be resized to {new_height} x {new_width}")
    downscales = new_height <= height and new_width <= width
    return resize(
        pixels, new_height, new_width, param.interpolation_algo_down if downscales else param.interpolation_algo_up
    )


# -- the random resizes of Intel Caffe -------------------------------------------------------------------

INTEL_RESIZES = ("random_resize_param", "random_aspect_ratio_param")


def check_intel_resize(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse bounds out of range, and a random resize without a crop.

    Raises:
        ConfigError: the message names the field.
    """
    fields = [name for name in INTEL_RESIZES if param.HasField(name)]
    if not fields:
        return
    if not param.crop_size:
        raise ConfigError(f"{where}: transform_param.{fields[0]} needs crop_size")
    sides = param.random_resize_param
    if sides.max_size and sides.max_size < sides.min_size or max(sides.min_size, sides.max_size) > _MAX_SIDE:
        raise ConfigError(f"{where}: random_resize_param needs min_size <= max_size <= {_MAX_SIDE}")
    parts = param.random_aspect_ratio_param
    if not 0 < parts.min_area_ratio <= parts.max_area_ratio <= 1:
        raise ConfigError(f"{where}: random_aspect_ratio_param needs 0 < min_area_ratio <= max_area_ratio <= 1")
    if not 0 < parts.aspect_ratio_change <= 1:
        raise ConfigError(f"{where}: random_aspect_ratio_param needs an aspect_ratio_change above 0, at most 1")


def intel_resize(pixels: Pixels, param: caffe_pb2.TransformationParameter, rng: SampleRng) -> Pixels:
    """Apply `random_resize_param`, else `random_aspect_ratio_param`.

    The first draws the length of the shorter side, from min_size to max_size. The second draws a part of the image,
    of an area from min_area_ratio to max_area_ratio and with sides that differ by the square of a factor from
    aspect_ratio_change to its inverse, and resizes it to crop_size. If max_attempt parts do not fit into the image, its
    shorter side becomes crop_size.

    Raises:
        DataError: OpenCV failed, or a side would be 0.
    """
    height, width = pixels.shape[:2]
    if param.HasField("random_resize_param"):
        sides = param.random_resize_param
        low, high = sides.min_size or min(height, width), sides.max_size or max(height, width)
        return _shorter_side(pixels, low + rng.below(max(high - low, 0) + 1), sides.resize_param, rng)
    parts = param.random_aspect_ratio_param
    for _ in range(parts.max_attempt):
        area = _f32(_ratio(parts.min_area_ratio, parts.max_area_ratio, rng) * height * width)
        change = _ratio(parts.aspect_ratio_change, 1 / parts.aspect_ratio_change, rng)
        rows, columns = int(math.sqrt(area) * change), int(math.sqrt(area) / change)
        if _ratio(0, 1, rng) < 0.5:
            rows, columns = columns, rows
        if rows <= height and columns <= width:
            top, left = rng.below(height - rows + 1), rng.below(width - columns + 1)
            part = np.ascontiguousarray(pixels[top : top + rows, left : left + columns])
            return _resize_to(part, param.crop_size, param.crop_size, parts.resize_param, rng)
    return _shorter_side(pixels, param.crop_size, parts.resize_param, rng)


def _ratio(low: float, high: float, rng: SampleRng) -> float:
    """Return a number between the bounds, in steps of 0.001."""
    return (rng.below(int((high - low) * 1000 + 1)) + low * 1000) / 1000


def _shorter_side(pixels: Pixels, size: int, param: Resize, rng: SampleRng) -> Pixels:
    height, width = pixels.shape[:2]
    rows = size if height < width else int(_f32(height) / _f32(width) * _f32(size))
    columns = int(_f32(width) / _f32(height) * _f32(size)) if height < width else size
    return _resize_to(pixels, rows, columns, param, rng)


def _resize_to(pixels: Pixels, height: int, width: int, param: Resize, rng: SampleRng) -> Pixels:
    sized = Resize()
    sized.CopyFrom(param)
    sized.height, sized.width = height, width
    return apply_resize(pixels, sized, rng)


# -- SSD's resize_param ----------------------------------------------------------------------------------


def check_resizes(params: Sequence[caffe_pb2.ResizeParameter], where: str) -> None:
    """Refuse a resize_param without a valid size, and several whose `prob` do not add up to 1.

    Raises:
        ConfigError: the message names the fields.
    """
    for param in params:
        if not (0 < param.height <= _MAX_SIDE and 0 < param.width <= _MAX_SIDE):
            sizes = f"{param.height} and {param.width}"
            raise ConfigError(f"{where}: resize_param needs height and width from 1 to {_MAX_SIDE}, not {sizes}")
    total = math.fsum(param.prob for param in params)
    if len(params) > 1 and not (abs(total - 1) <= _MAX_PROB_ERROR and all(0 <= param.prob <= 1 for param in params)):
        raise ConfigError(
            f"{where}: the prob of {len(params)} resize_param add up to {total:g}; numbers from 0 to 1 must add up to 1"
        )


def choose_resize(params: Sequence[caffe_pb2.ResizeParameter], rng: SampleRng) -> int:
    """Return the index of one of several resize_param, at random by their `prob`."""
    ends = np.cumsum([param.prob for param in params])
    return min(int(np.searchsorted(ends, rng.uniform(0, 1) * ends[-1], side="right")), len(params) - 1)


def apply_resize(pixels: Pixels, param: caffe_pb2.ResizeParameter, rng: SampleRng) -> Pixels:
    """Resize an image by one `resize_param`; its `prob` has no effect, as in Caffe.

    Raises:
        DataError: the number of pad values does not fit, or a side would be 0.
    """
    height, width = param.height, param.width
    modes = param.interp_mode
    mode = modes[rng.below(len(modes))] if modes else Resize.LINEAR
    interpolation: int = getattr(opencv(), _INTERPOLATIONS[mode])
    if param.resize_mode == Resize.WARP:
        return resize(pixels, height, width, interpolation)
    new_height, new_width = _fit_size(pixels, param)
    resized = resize(pixels, new_height, new_width, interpolation)
    if param.resize_mode == Resize.FIT_SMALL_SIZE:
        return resized
    top, left = (height - new_height) // 2, (width - new_width) // 2
    borders = (top, height - new_height - top, left, width - new_width - left)
    border: int = getattr(opencv(), _BORDERS[param.pad_mode])
    return call_opencv("copyMakeBorder", resized, *borders, border, value=_pad_value(param, pixels.shape[2]))


def _fit_size(pixels: Pixels, param: caffe_pb2.ResizeParameter) -> tuple[int, int]:
    """Return a size of the image's aspect ratio: inside param's size, or covering it for FIT_SMALL_SIZE."""
    height, width = param.height, param.width
    image_ratio, target_ratio = _f32(pixels.shape[1]) / _f32(pixels.shape[0]), _f32(width) / _f32(height)
    by_width = image_ratio < target_ratio if param.resize_mode == Resize.FIT_SMALL_SIZE else image_ratio > target_ratio
    new_height, new_width = (
        (math.floor(_f32(width) / image_ratio), width) if by_width else (height, math.floor(image_ratio * _f32(height)))
    )
    if max(new_height, new_width) > _MAX_SIDE:
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
    """Refuse invalid ranges of distort_param.

    Raises:
        ConfigError: the message names the field.
    """
    for name in ("brightness_delta", "hue_delta", "contrast_lower", "saturation_lower"):
        if not getattr(param, name) >= 0:
            raise ConfigError(f"{where}: distort_param.{name} is {getattr(param, name):g}; it must not be negative")
    for name in ("contrast", "saturation"):
        lower, upper = getattr(param, f"{name}_lower"), getattr(param, f"{name}_upper")
        if getattr(param, f"{name}_prob") > 0 and not upper >= lower:
            raise ConfigError(f"{where}: distort_param.{name}_upper {upper:g} is less than {name}_lower {lower:g}")


def distort(pixels: Pixels, param: caffe_pb2.DistortionParameter, rng: SampleRng) -> Pixels:
    """Distort colors. A random half of the images changes contrast before saturation and hue, the other half after.

    Raises:
        DataError: the image is not uint8, or a change needs three channels.
    """
    if pixels.dtype != np.uint8:
        raise DataError("is a float image; distort_param needs uint8")
    image: Bytes = pixels
    contrast_first = rng.uniform(0, 1) > 0.5
    if rng.uniform(0, 1) < param.brightness_prob:
        image = scale_bytes(image, 1, rng.uniform(-param.brightness_delta, param.brightness_delta))
    if contrast_first:
        image = _contrast(image, param, rng)
    if rng.uniform(0, 1) < param.saturation_prob:
        image = adjust_hsv(image, 1, rng.uniform(param.saturation_lower, param.saturation_upper), 0)
    if rng.uniform(0, 1) < param.hue_prob:
        image = _hue(image, rng.uniform(-param.hue_delta, param.hue_delta))
    if not contrast_first:
        image = _contrast(image, param, rng)
    if rng.uniform(0, 1) < param.random_order_prob:
        image = _reorder(image, rng)
    return image


def _contrast(image: Bytes, param: caffe_pb2.DistortionParameter, rng: SampleRng) -> Bytes:
    if not rng.uniform(0, 1) < param.contrast_prob:
        return image
    factor = rng.uniform(param.contrast_lower, param.contrast_upper)
    return scale_bytes(image, factor, 0) if abs(factor - 1) > 1e-3 else image


def _hue(image: Bytes, summand: float) -> Bytes:
    """Shift the hue. A shift of 0 skips the lossy conversion to HSV and back."""
    return adjust_hsv(image, 0, 1, summand) if summand else image


def scale_bytes(image: Bytes, factor: float, summand: float) -> Bytes:
    """Return round(image * factor + summand), computed in float32 and saturated, as `cv::Mat::convertTo`."""
    table = np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(summand)
    return call_opencv("LUT", image, np.clip(np.rint(table), 0, 255).astype(np.uint8))


def adjust_hsv(image: Bytes, channel: int, factor: float, summand: float) -> Bytes:
    """Apply `scale_bytes` to the hue (channel 0, in units of 2 degrees) or the saturation (channel 1).

    Raises:
        DataError: the image does not have three channels.
    """
    cv2 = opencv()
    hsv = call_opencv("cvtColor", image, cv2.COLOR_BGR2HSV)
    changed = scale_bytes(call_opencv("extractChannel", hsv, channel), factor, summand)
    return call_opencv("cvtColor", call_opencv("insertChannel", changed, hsv, channel), cv2.COLOR_HSV2BGR)


def _reorder(image: Bytes, rng: SampleRng) -> Bytes:
    if image.shape[2] != 3:
        raise DataError(f"has {image.shape[2]} channels; random_order_prob needs 3")
    order = np.argsort(rng.words(3), kind="stable")
    return np.ascontiguousarray(image[:, :, order])


# -- noise_param ---------------------------------------------------------------------------------------


_POSTERIZE_STEP = 64
"""Posterizing quantises values to multiples of this."""
_CLIP_LIMIT = 4.0


def check_noise(param: caffe_pb2.NoiseParameter, where: str) -> None:
    """Refuse an incomplete saltpepper_param.

    Raises:
        ConfigError: the message names the field.
    """
    if param.saltpepper and not param.saltpepper_param.value:
        raise ConfigError(f"{where}: noise_param.saltpepper needs saltpepper_param {{ value: ... }}")
    if param.saltpepper and not 0 <= param.saltpepper_param.fraction <= 1:
        raise ConfigError(
            f"{where}: noise_param.saltpepper_param.fraction is {param.saltpepper_param.fraction:g}, not from 0 to 1"
        )


def apply_noise(pixels: Pixels, param: caffe_pb2.NoiseParameter, rng: SampleRng) -> Pixels:
    """Apply `noise_param` to an image; the result is float32 with `convert_to_lab`.

    Raises:
        DataError: OpenCV failed, for example because the image has one channel.
    """
    cv2 = opencv()
    if param.decolorize:
        pixels = call_opencv("cvtColor", call_opencv("cvtColor", pixels, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
    if param.gauss_blur:
        pixels = call_opencv("GaussianBlur", pixels, (7, 7), 1.5)
    if param.hist_eq:
        pixels = _apply_to_luma(pixels, cv2.equalizeHist)
    if param.clahe:
        pixels = _apply_to_luma(pixels, cv2.createCLAHE(clipLimit=_CLIP_LIMIT).apply)
    if param.jpeg > 0:
        pixels = _jpeg(pixels, int(param.jpeg))
    return _convert_color_space(_apply_byte_noise(pixels, param, rng), param)


def _apply_byte_noise(pixels: Pixels, param: caffe_pb2.NoiseParameter, rng: SampleRng) -> Pixels:
    cv2 = opencv()
    if param.erode:
        pixels = call_opencv("erode", pixels, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3), (1, 1)))
    if param.posterize:
        pixels = call_opencv(
            "LUT", pixels, (np.arange(256) // _POSTERIZE_STEP * _POSTERIZE_STEP + _POSTERIZE_STEP // 2).astype(np.uint8)
        )
    if param.inverse:
        pixels = call_opencv("bitwise_not", pixels)
    return _salt_and_pepper(pixels, param.saltpepper_param, rng) if param.saltpepper else pixels


def _convert_color_space(pixels: Pixels, param: caffe_pb2.NoiseParameter) -> Pixels:
    cv2 = opencv()
    if param.convert_to_hsv:
        pixels = call_opencv("cvtColor", pixels, cv2.COLOR_BGR2HSV)
    if param.convert_to_lab:
        pixels = call_opencv("cvtColor", pixels.astype(np.float32) * np.float32(1 / 255), cv2.COLOR_BGR2Lab)
    return pixels


def _apply_to_luma(pixels: Pixels, function: object) -> Pixels:
    """Apply a one-channel function to a gray image or to the Y channel of YCrCb."""
    cv2 = opencv()
    if not callable(function) or pixels.dtype != np.uint8:
        raise DataError("is a float image; hist_eq and clahe need uint8")
    if pixels.shape[2] == 1:
        return np.atleast_3d(np.asarray(function(pixels[:, :, 0])))
    planes = np.array(call_opencv("cvtColor", pixels, cv2.COLOR_BGR2YCrCb))
    planes[:, :, 0] = function(np.ascontiguousarray(planes[:, :, 0]))
    return call_opencv("cvtColor", planes, cv2.COLOR_YCrCb2BGR)


def _jpeg(pixels: Pixels, quality: int) -> Pixels:
    """Recompress as JPEG. Gray images stay gray: Caffe decodes three channels but reads only the top's one."""
    cv2 = opencv()
    flag = cv2.IMREAD_GRAYSCALE if pixels.shape[2] == 1 else cv2.IMREAD_COLOR
    return np.atleast_3d(decode(encode(pixels, settings=[cv2.IMWRITE_JPEG_QUALITY, quality]), flag))


def _salt_and_pepper(pixels: Pixels, param: caffe_pb2.SaltPepperParameter, rng: SampleRng) -> Pixels:
    """Set random pixels (with repetition) to the given values. As in Caffe, only for 1 or 3 channels."""
    rows, columns, channels = pixels.shape
    values = list(param.value)
    if len(values) not in (1, channels):
        raise DataError(f"has {channels} channels, but saltpepper_param has {len(values)} value; give 1 or {channels}")
    if channels not in (1, 3):
        return pixels
    count = int(np.floor(np.float32(param.fraction) * np.float32(columns) * np.float32(rows)))
    changed: Pixels = pixels.copy()
    positions = rng.integers(columns, count), rng.integers(rows, count)
    changed[positions[1], positions[0]] = np.array(values).astype(np.int64).astype(np.uint8)
    return changed
