"""JPEG decoding of batches on the CPU by nvImageCodec, to the pixels of `decode_image`; imported by layers/input.

OpenCV decodes one image a call, and with many threads they wait for Python's lock. Here the lock is released once for
each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.deferred import JitThreshold
from caffepy.backend.image_decoder import ImageDecoder
from caffepy.backend.nvimgcodec import BatchCodec, import_nvimgcodec
from caffepy.data.images.datum import copy_planes
from caffepy.data.transforms.pixels import resize, to_image
from caffepy.data.workers import Workers
from caffepy.errors import DataError

_NUMBA_IMPORT_IMAGES = 20_000
"""Images that NumPy crops while numba is imported, about 0.5 s."""


class HostImageDecoder(ImageDecoder):
    """`ImageDecoder` of the CPU.

    Args:
        threads: threads that decode, and that resize.
        resizes: whether images may be resized; without, copies into the crops are faster.

    Raises:
        MissingExtraError: nvImageCodec is not installed.
        RuntimeError: nvImageCodec cannot make a decoder.
    """

    def __init__(self, threads: int, resizes: bool) -> None:
        self._planar = not resizes
        self._codec = BatchCodec(import_nvimgcodec(), None, self._planar, max(threads - 1, 1))
        self._resizers = Workers(threads, "resize")
        self._jit_threshold = JitThreshold(_NUMBA_IMPORT_IMAGES)

    def decode(self, files: Sequence[Any], places: Any, pixels: Any) -> list[bool]:
        images = self._codec.decode(files)
        if self._planar:
            if images:
                self._crop(images, places, pixels)
            return [number in images for number in range(len(files))]
        return self._resize(images, places, pixels)

    def _crop(self, images: dict[int, Any], places: Any, pixels: Any) -> None:
        """Crop planar images, RGB, as `decode`."""
        numbers = list(images)
        if self._jit_threshold.ends(len(numbers)):
            from caffepy.data.images.bulk_copy import copy_crops

            layouts = [image.__array_interface__ for image in images.values()]
            addresses = np.array([layout["data"][0] for layout in layouts], np.int64)
            heights, widths = np.array([layout["shape"][1:] for layout in layouts], np.int64).T
            strides = np.stack((widths, heights * widths))
            corners = addresses + places[numbers, 2] * widths + places[numbers, 3]
            if all(layout["strides"] is None for layout in layouts) and copy_crops(corners, strides, numbers, pixels):
                return
        height, width = pixels.shape[2:]
        for number, image in images.items():
            top, left = places[number, 2], places[number, 3]
            pixels[number] = np.asarray(image)[::-1, top : top + height, left : left + width]

    def _resize(self, images: dict[int, Any], places: Any, pixels: Any) -> list[bool]:
        """Resize and crop images (H, W, 3), as `decode`."""
        rows = places.tolist()
        done = [False] * len(rows)

        def place(number: int) -> None:
            image = np.asarray(images[number])
            height, width, top, left, interpolation = rows[number]
            try:
                if image.shape[:2] != (height, width):
                    image = resize(image, height, width, interpolation)
            except DataError:
                return  # `preprocess` raises it again
            crop = image[top : top + pixels.shape[2], left : left + pixels.shape[3]]
            copy_planes(to_image(crop), pixels[number])
            done[number] = True

        resized = [number for number, image in images.items() if [image.height, image.width] != rows[number][:2]]
        self._resizers.run(place, resized)
        for number in images.keys() - set(resized):
            place(number)
        return done

    def close(self) -> None:
        self._resizers.close()
        self._codec.close()
