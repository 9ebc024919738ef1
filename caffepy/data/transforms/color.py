"""SSD's `distort_param`: random brightness, contrast, saturation, hue and order of the channels.

Defined by NVIDIA Caffe's `im_transforms.cpp` (ApplyDistort).
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import opencv
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Pixels, call
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

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
