"""Images, records and what lies between them and a net's input (pycaffe's `io.py`).

Images are (H, W, K) float32 arrays in [0, 1], channels red, green, blue, as scikit-image reads them; OpenCV does the
reading here. Resizing is scikit-image's of Caffe's day: without the smoothing that newer versions put before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import decode_image, opencv
from caffepy.data.images.png import is_png, whole_png
from caffepy.errors import DataError, MissingExtraError, UserError
from caffepy.files import read_regular
from caffepy.proto import caffe_pb2
from caffepy.proto.caffe_pb2 import BlobProto, Datum

Floats = NDArray[Any]

_MOST_BYTES = 1 << 30
_RAW_TYPES = {caffe_pb2.FLOAT: "<f4", caffe_pb2.DOUBLE: "<f8", caffe_pb2.FLOAT16: "<f2"}
_LUMINANCE = np.array([0.2125, 0.7154, 0.0721])
"""Red, green and blue in scikit-image's `rgb2gray` (ITU-R BT.709)."""


class ArrayError(UserError, ValueError):
    """An array that cannot be used so; a ValueError, as pycaffe raises."""


# -- records ----------------------------------------------------------------------------------------


def blobproto_to_array(blob: BlobProto, return_diff: bool = False) -> Floats:
    """A BlobProto's data, or its diff, in its shape; the old four dimensions go before `shape`.

    Raises:
        ArrayError: shape and number of elements do not fit.
    """
    values = _blob_values(blob, "diff" if return_diff else "data")
    old = ("num", "channels", "height", "width")
    if any(blob.HasField(name) for name in old):
        shape = tuple(getattr(blob, name) for name in old)
    else:
        shape = tuple(blob.shape.dim)
    if math.prod(shape) != values.size or any(size < 0 for size in shape):
        raise ArrayError(f"the BlobProto has {values.size} elements and the shape {shape}, which do not fit")
    return values.reshape(shape)


def _blob_values(blob: BlobProto, what: str) -> Floats:
    raw_type = getattr(blob, f"raw_{what}_type")
    if (raw := getattr(blob, f"raw_{what}")) and raw_type in _RAW_TYPES:
        dtype = np.dtype(_RAW_TYPES[raw_type])
        if len(raw) % dtype.itemsize:
            raise ArrayError(f"the BlobProto's raw_{what} has {len(raw)} bytes, no whole number of {dtype.name}")
        return np.frombuffer(raw, dtype).astype(float)
    return np.array(getattr(blob, f"double_{what}") or getattr(blob, what), dtype=float)


def array_to_blobproto(arr: Floats, diff: Floats | None = None) -> BlobProto:
    """A BlobProto of an array; `diff` must have its shape.

    Raises:
        ArrayError: it has another.
    """
    blob = BlobProto(data=np.asarray(arr, dtype=float).ravel())
    blob.shape.dim.extend(np.shape(arr))
    if diff is not None:
        if np.shape(diff) != np.shape(arr):
            raise ArrayError(f"data has the shape {np.shape(arr)} and diff {np.shape(diff)}; they must be the same")
        blob.diff.extend(np.asarray(diff, dtype=float).ravel())
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[Floats]) -> bytes:
    """Arrays as the bytes of a BlobProtoVector."""
    return caffe_pb2.BlobProtoVector(blobs=[array_to_blobproto(array) for array in arraylist]).SerializeToString()


arraylist_to_blobprotovecor_str = arraylist_to_blobprotovector_str
"""The name that it has in NVIDIA Caffe."""


def blobprotovector_str_to_arraylist(str: bytes) -> list[Floats]:
    """The arrays in the bytes of a BlobProtoVector."""
    return [blobproto_to_array(blob) for blob in caffe_pb2.BlobProtoVector.FromString(str).blobs]


def array_to_datum(arr: Floats, label: int | None = None) -> Datum:
    """A Datum of a (C, H, W) array: bytes of a uint8 array, `float_data` of any other.

    Raises:
        ArrayError: the array has not three dimensions.
    """
    if arr.ndim != 3:
        raise ArrayError(f"Incorrect array shape. A Datum holds (C, H, W); this has the shape {arr.shape}")
    channels, height, width = arr.shape
    datum = Datum(channels=channels, height=height, width=width)
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(float).ravel())
    if label is not None:
        datum.label = int(label)
    return datum


def datum_to_array(datum: Datum) -> Floats:
    """A Datum's (C, H, W) array; an encoded image is decoded, its channels blue, green, red.

    Raises:
        ArrayError: dimensions and number of elements do not fit.
        DataError: the image cannot be decoded.
    """
    if datum.encoded:
        return decode_image(datum.data)
    shape = (datum.channels, datum.height, datum.width)
    values = np.frombuffer(datum.data, np.uint8).copy() if datum.data else np.array(datum.float_data, dtype=float)
    if math.prod(shape) != values.size or min(shape) < 0:
        raise ArrayError(f"the Datum has {values.size} elements and the shape {shape}, which do not fit")
    return values.reshape(shape)


# -- images -----------------------------------------------------------------------------------------


def load_image(filename: str | Path, color: bool = True) -> NDArray[np.float32]:
    """An image file as (H, W, 3) in red, green, blue, or (H, W, 1) without `color`, from 0 to 1.

    Transparency is dropped; for a gray image it shows white, as in scikit-image. EXIF does not turn the image.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    pixels = _decode(filename)
    image = pixels / np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else pixels.astype(float)
    if image.ndim == 2:
        image = image[:, :, np.newaxis]
    elif not color:
        image = _gray(image)
    if color:
        image = np.tile(image, (1, 1, 3)) if image.shape[2] == 1 else image[:, :, 2::-1]
    return np.ascontiguousarray(image, dtype=np.float32)


def _decode(filename: str | Path) -> NDArray[Any]:
    """(H, W) or (H, W, K) as OpenCV has it: blue, green, red and transparency."""
    cv2 = opencv()
    try:
        data: bytes | memoryview = read_regular(filename, _MOST_BYTES)
        data = whole_png(data) if is_png(data) else data
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) if data else None
    except OSError as error:
        raise DataError(f"image '{filename}' cannot be read: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"image '{filename}' {error}") from error
    except (cv2.error, MemoryError) as error:
        raise DataError(f"image '{filename}' cannot be decoded ({' '.join(str(error).split())})") from error
    if pixels is None:
        raise DataError(f"image '{filename}' cannot be decoded: it is damaged, or of a format that OpenCV has not")
    return np.asarray(pixels)


def _gray(image: Floats) -> Floats:
    if image.shape[2] == 4:
        alpha = image[:, :, 3:]
        image = image[:, :, :3] * alpha + (1 - alpha)
    gray: Floats = (image[:, :, ::-1] @ _LUMINANCE)[:, :, np.newaxis]
    return gray


def resize_image(im: Floats, new_dims: Sequence[int], interp_order: int = 1) -> NDArray[np.float32]:
    """An image (H, W, K) in another size, as Caffe's `resize_image`.

    With 1 or 3 channels pixel centres are aligned and beyond the border lies the image's minimum (scikit-image's
    ``resize(mode='constant')``); with others the corner pixels are aligned (SciPy's `zoom`). Linear results are
    within 1e-6 of the image's range of theirs.

    Args:
        im: the image.
        new_dims: height and width.
        interp_order: the spline's order, 0 to 5; all but 1, linear, need SciPy.

    Raises:
        ArrayError: the image has not three dimensions, or a size is not positive.
        MissingExtraError: SciPy is needed and not there.
    """
    height, width = (int(size) for size in new_dims)
    if im.ndim != 3 or im.size == 0 or min(height, width) <= 0:
        raise ArrayError(f"an image of the shape {im.shape} cannot be resized to {height} x {width}")
    if im.shape[2] not in (1, 3):
        return _resample(im, height, width, interp_order, aligned=False).astype(np.float32)
    low, high = float(im.min()), float(im.max())
    if not high > low:
        return np.full((height, width, im.shape[2]), low, dtype=np.float32)
    unit = (im.astype(np.float64) - low) / (high - low)
    resized = np.clip(_resample(unit, height, width, interp_order, aligned=True), 0, 1)
    return np.asarray(resized * (high - low) + low, dtype=np.float32)


def _resample(image: Floats, height: int, width: int, order: int, aligned: bool) -> Floats:
    """The image in another size; beyond the border lies 0 where pixel centres are `aligned`."""
    if order == 1:
        return _linear(_linear(image, 0, height, aligned), 1, width, aligned)
    try:
        from scipy import ndimage
    except ImportError as error:
        raise MissingExtraError("scipy", "images", f"to resize with interpolation order {order}") from error
    factors = (height / image.shape[0], width / image.shape[1], 1)
    mode = "grid-constant" if aligned else "constant"
    return np.asarray(ndimage.zoom(image, factors, order=order, mode=mode, grid_mode=aligned))


def _linear(image: Floats, axis: int, size: int, aligned: bool) -> Floats:
    old = image.shape[axis]
    centres = (np.arange(size) + 0.5) * (old / size) - 0.5
    at = centres if aligned else np.arange(size) * ((old - 1) / max(size - 1, 1))
    first = np.floor(at).astype(int)
    result: Floats = np.zeros(())
    for index, weight in ((first, first + 1 - at), (first + 1, at - first)):
        inside = np.where((index >= 0) & (index < old), weight, 0.0)
        spread = inside.reshape([-1 if other == axis else 1 for other in range(image.ndim)])
        result = result + image.take(index.clip(0, old - 1), axis) * spread
    return result


def oversample(images: Sequence[Floats] | Floats, crop_dims: Sequence[int] | Floats) -> NDArray[np.float32]:
    """Ten crops of each image: the four corners, the centre, and these mirrored.

    Args:
        images: of one shape (H, W, K).
        crop_dims: height and width of the crops.

    Returns:
        (10 N, height, width, K); an image's crops follow each other.

    Raises:
        ArrayError: a crop is larger than an image.
    """
    height, width = (int(size) for size in crop_dims)
    rows, columns, channels = images[0].shape
    if height > rows or width > columns:
        raise ArrayError(f"crops of {height} x {width} cannot be cut out of images of {rows} x {columns}")
    corners = [(y, x) for y in (0, rows - height) for x in (0, columns - width)]
    places = [*corners, (int(rows / 2 - height / 2), int(columns / 2 - width / 2))]
    crops = np.empty((len(images), 10, height, width, channels), dtype=np.float32)
    for own, image in zip(crops, images, strict=True):
        for crop, (y, x) in zip(own, places, strict=False):
            crop[...] = image[y : y + height, x : x + width]
        own[5:] = own[:5, :, ::-1]
    return crops.reshape(-1, height, width, channels)


# -- from images to a net's input --------------------------------------------------------------------


class Transformer:
    """Brings images into the form that a net's input has, and back.

    Args:
        inputs: the shape (N, K, H, W) of each input by its name.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, Floats] = {}
        self.input_scale: dict[str, float] = {}

    def _check_input(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise UserError(f"{in_} is not one of the net inputs: {self.inputs}")

    def preprocess(self, in_: str, data: Floats) -> NDArray[np.float32]:
        """An image (H', W', K) as the input `in_` takes it, (K, H, W); `data` stays as it is.

        In this order: float32, resized, transposed, channels swapped, times raw_scale, minus mean, times input_scale.
        """
        self._check_input(in_)
        image = data.astype(np.float32, copy=False)
        size = self.inputs[in_][2:]
        if image.shape[:2] != size:
            image = resize_image(image, size)
        if in_ in self.transpose:
            image = image.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            image = image[list(self.channel_swap[in_])]
        if np.may_share_memory(image, data):
            image = image.copy()
        if in_ in self.raw_scale:
            image *= self.raw_scale[in_]
        if in_ in self.mean:
            image -= self.mean[in_]
        if in_ in self.input_scale:
            image *= self.input_scale[in_]
        return image

    def deprocess(self, in_: str, data: Floats) -> Floats:
        """The image out of an input (K, H, W): `preprocess` backwards, without the change of size."""
        self._check_input(in_)
        image: Floats = data.copy().squeeze()
        if image.ndim < 3 <= data.ndim and (in_ in self.transpose or in_ in self.mean):
            image = image.reshape(data.shape[-3:])
        if in_ in self.input_scale:
            image /= self.input_scale[in_]
        if in_ in self.mean:
            image += self.mean[in_]
        if in_ in self.raw_scale:
            image /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            image = image[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            image = image.transpose(np.argsort(self.transpose[in_]))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """The order of dimensions; (2, 0, 1) makes (H, W, K) to (K, H, W)."""
        self._check_input(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise UserError(
                "Transpose order needs to have the same number of dimensions as the input: "
                f"'{in_}' has {len(self.inputs[in_]) - 1}, the order {tuple(order)} has {len(order)}"
            )
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """The order of channels, which are the first dimension after `set_transpose`; (2, 1, 0) makes RGB to BGR."""
        self._check_input(in_)
        if len(order) != self.inputs[in_][1]:
            raise UserError(
                "Channel swap needs to have the same number of dimensions as the input channels: "
                f"'{in_}' has {self.inputs[in_][1]}, the order {tuple(order)} has {len(order)}"
            )
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """The factor before the mean is subtracted; 255 for nets that were trained with bytes."""
        self._check_input(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: Floats) -> None:
        """What is subtracted: a number a channel (K,), or an image (K, H, W) or (H, W), resized if need be.

        Raises:
            ArrayError: it has another number of channels or of dimensions.
        """
        self._check_input(in_)
        channels, *size = self.inputs[in_][1:]
        if mean.ndim == 1:
            if mean.shape[0] != channels:
                raise ArrayError(
                    f"Mean channels incompatible with input. The mean has {mean.shape[0]}, '{in_}' has {channels}"
                )
            mean = mean[:, np.newaxis, np.newaxis]
        else:
            mean = self._mean_image(mean, channels, size)
        self.mean[in_] = mean

    def _mean_image(self, mean: Floats, channels: int, size: Sequence[int]) -> Floats:
        if mean.ndim == 2:
            mean = mean[np.newaxis]
        if mean.ndim != 3 or mean.shape[0] not in (1, channels):
            raise ArrayError(
                f"Mean shape invalid: {mean.shape}; for {channels} channels it is (K,), (H, W) or (K, H, W)"
            )
        if mean.shape[1:] == tuple(size):
            return mean
        resized: Floats = resize_image(mean.transpose(1, 2, 0), size).transpose(2, 0, 1)
        return resized

    def set_input_scale(self, in_: str, scale: float) -> None:
        """The factor after the mean is subtracted."""
        self._check_input(in_)
        self.input_scale[in_] = scale
