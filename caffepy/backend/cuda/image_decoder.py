"""JPEG decoding on the GPU: nvImageCodec decodes batches, a kernel resizes and crops them; imported by `input`.

nvImageCodec uses the GPU's JPEG engines where it has some, else CUDA kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import launch, library_kernel
from caffepy.backend.cuda.device import cupy
from caffepy.backend.image_decoder import ImageDecoder
from caffepy.errors import MissingExtraError

_FIELDS = 11
"""Numbers of a `Job` of kernels/place.cu."""
_DECODING_THREADS = 2
"""Threads of nvImageCodec for the parts of its work that the CPU does."""


def import_nvimgcodec() -> Any:
    """Import nvImageCodec.

    Raises:
        MissingExtraError: it is not installed.
    """
    # It would print a line for each file that it cannot decode; the loader decodes these with OpenCV.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        extra = f"decode{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
        raise MissingExtraError("nvImageCodec", extra, "to decode images on the GPU") from error
    return nvimgcodec


class BatchCodec:
    """Decodes batches of JPEG files to images (H, W, 3), BGR, and reuses their memory. One thread at a time may use it.

    Args:
        device: number of the GPU.

    Raises:
        MissingExtraError: nvImageCodec is not installed.
        RuntimeError: it cannot make a decoder.
    """

    def __init__(self, device: int) -> None:
        library = self._library = import_nvimgcodec()
        kinds = library.BackendKind
        try:
            # Other ways of decoding beside the engines slow them down: on an H100 from 16,000 to 8,000 images/s.
            self._decoder = self._make(device, kinds.HW_GPU_ONLY)
        except RuntimeError:  # a GPU without JPEG engines
            self._decoder = self._make(device, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
        self._settings = library.DecodeParams(
            apply_exif_orientation=False,
            color_spec=library.ColorSpec.SRGB,
            sample_format=library.SampleFormat.I_BGR,
        )
        self._images: list[Any] = []
        """Images of earlier batches, whose memory the next one reuses."""

    def _make(self, device: int, *kinds: Any) -> Any:
        backends = [self._library.Backend(kind) for kind in kinds]
        return self._library.Decoder(device_id=device, max_num_cpu_threads=_DECODING_THREADS, backends=backends)

    def decode(self, files: Sequence[Any], stream: int = 0) -> dict[int, Any]:
        """Return the images of the files that can be decoded, by index; the next call overwrites them.

        Args:
            files: NumPy arrays, uint8, 1-D; None: nothing to decode.
            stream: the CUDA stream that orders the work.
        """
        streams: dict[int, Any] = {}
        for number, file in enumerate(files):
            if file is not None:
                try:
                    streams[number] = self._library.CodeStream(file)
                except (RuntimeError, ValueError):
                    continue
        if not streams:
            return {}
        count = len(streams)
        reused = self._images[:count] if len(self._images) >= count else None
        decoded = self._decoder.decode(list(streams.values()), images=reused, params=self._settings, cuda_stream=stream)
        images = {number: image for number, image in zip(streams, decoded, strict=True) if image is not None}
        self._images = [*images.values(), *(self._images[count:] if reused else [])]
        return images

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._images, self._decoder = [], None


class CudaImageDecoder(ImageDecoder):
    """`ImageDecoder` of one GPU, on a stream of its own.

    Args:
        device: the GPU's number.

    Raises:
        MissingExtraError: nvImageCodec is not installed.
    """

    def __init__(self, device: int) -> None:
        self._codec = BatchCodec(device)
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
