"""SSD's `noise_param`: damage to images, each kind on or off.

Defined by NVIDIA Caffe's `im_transforms.cpp` (ApplyNoise); `prob` has no effect there and here.
"""

from __future__ import annotations

import numpy as np

from caffepy.data.images.datum import opencv
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Pixels, call
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

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
