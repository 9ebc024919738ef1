"""JPEG decoding on the GPU: nvImageCodec decodes batches, a kernel resizes and crops them; imported by `input`.

nvImageCodec uses the GPU's JPEG engines where it has some, else CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import launch, library_kernel
from caffepy.backend.cuda.device import cupy
from caffepy.backend.image_decoder import ImageDecoder
from caffepy.backend.nvimgcodec import BatchCodec, import_nvimgcodec

_FIELDS = 11
"""Numbers of a `Job` of kernels/place.cu."""
_DECODING_THREADS = 2
"""Threads of nvImageCodec for the parts of its work that the CPU does."""


class CudaImageDecoder(ImageDecoder):
    """`ImageDecoder` of one GPU, on a stream of its own.

    Args:
        device: the GPU's number.

    Raises:
        MissingExtraError: nvImageCodec is not installed.
    """

    def __init__(self, device: int) -> None:
        library = import_nvimgcodec(f"decode{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
        self._codec = BatchCodec(library, device, planar=False, threads=_DECODING_THREADS)
        self._device = cupy.cuda.Device(device)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._crops: Any = None
        self._jobs: Any = None
        self._kernel = library_kernel("place", "place")

    def decode(self, files: Sequence[Any], places: Any, pixels: Any) -> list[bool]:
        with self._device, self._stream:
            images = self._codec.decode(files, self._stream.ptr)
            jobs = np.zeros((len(files), _FIELDS), np.int64)
            for number, image in images.items():
                jobs[number, :6] = _layout(image)
                jobs[number, 6:] = places[number]
            self._place(jobs, pixels)
        return [number in images for number in range(len(files))]

    def _place(self, jobs: Any, pixels: Any) -> None:
        """Resize and crop the decoded images, copy them to the host and wait."""
        if self._crops is None or self._crops.size < pixels.size:
            self._crops = cupy.empty(pixels.size, "uint8")
        if self._jobs is None or self._jobs.shape[0] < len(jobs):
            self._jobs = cupy.empty(jobs.shape, "int64")
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(
            self._jobs.data.ptr, jobs.ctypes.data, jobs.nbytes, runtime.memcpyHostToDevice, self._stream.ptr
        )
        count, _, height, width = pixels.shape
        launch(self._kernel, count * height * width, (self._jobs, count, height, width, self._crops))
        runtime.memcpyAsync(
            pixels.ctypes.data, self._crops.data.ptr, pixels.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr
        )
        self._stream.synchronize()

    def close(self) -> None:
        self._codec.close()
        self._crops = self._jobs = None


def _layout(image: Any) -> tuple[int, int, int, int, int, int]:
    """Return address, strides in bytes of rows, columns and channels, height and width of an image (H, W, 3), BGR.

    The channels' stride is negative, and the address is that of red: the kernel takes RGB.
    """
    interface = image.__cuda_array_interface__
    height, width, channels = interface["shape"]
    rows, columns, step = interface.get("strides") or (width * channels, channels, 1)
    return interface["data"][0] + 2 * step, rows, columns, -step, height, width
