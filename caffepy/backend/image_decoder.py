"""Decoding of images on the device: the interface. `InputPrimitives.image_decoder` makes decoders; loaders use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

NEAREST, LINEAR, CUBIC, AREA = range(4)
"""Interpolations, numbered as OpenCV's."""


class ImageDecoder(ABC):
    """Decodes files on the device, resizes and crops them there, and copies the crops to the host.

    One thread at a time may use it; several decoders work at the same time.
    """

    @abstractmethod
    def decode(self, files: Sequence[Any], places: Any, pixels: Any) -> list[bool]:
        """Decode files into an array of the host and wait for the result.

        Args:
            files: for each image a file with three channels (NumPy, uint8, 1-D), or None: nothing to decode.
            places: int64 (NumPy), (N, 5): height and width to which each image is resized, row and column of the
                crop in the resized image, and the interpolation.
            pixels: uint8 (NumPy), (N, 3, H, W), contiguous, in `host_memory`: receives the crops, blue first.

        Returns:
            One flag per image: whether it was decoded. The pixels of others are undefined.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Idempotent."""
