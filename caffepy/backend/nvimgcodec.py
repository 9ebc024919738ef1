"""nvImageCodec: batches of JPEG files to images, on a GPU or on the CPU; imported by the image decoders.

On the CPU its decoder is libjpeg-turbo with the settings that OpenCV has, so plain files get OpenCV's pixels. A call
decodes a batch in the library's own threads and releases Python's lock once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from caffepy.errors import MissingExtraError


def import_nvimgcodec(extra: str = "decode13") -> Any:
    """Import the library; `extra` installs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    # It would print a line for each file that it cannot decode; the loader decodes these with OpenCV.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise MissingExtraError("nvImageCodec", extra, "to decode batches of images") from error
    return nvimgcodec


class BatchCodec:
    """Decodes batches of files and reuses the memory of the images. One thread at a time may use it.

    Args:
        library: the module.
        device: number of the GPU; None: the CPU decodes.
        planar: whether images are planes in the order RGB; else (H, W, 3), BGR.
        threads: threads of the library.

    Raises:
        RuntimeError: the library cannot make the decoder.
    """

    def __init__(self, library: Any, device: int | None, planar: bool, threads: int) -> None:
        self._library = library
        kinds = library.BackendKind
        if device is None:
            self._decoder = self._make(library.NVIMGCODEC_DEVICE_CPU_ONLY, threads, kinds.CPU_ONLY)
        else:
            try:
                # Other ways of decoding beside the engines slow them down: on an H100 from 16,000 to 8,000 images/s.
                self._decoder = self._make(device, threads, kinds.HW_GPU_ONLY)
            except RuntimeError:  # a GPU without JPEG engines
                self._decoder = self._make(device, threads, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
        layout = library.SampleFormat.P_RGB if planar else library.SampleFormat.I_BGR
        self._settings = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB, sample_format=layout
        )
        self._images: list[Any] = []
        """Images of earlier batches, whose memory the next one reuses."""

    def _make(self, device: int, threads: int, *kinds: Any) -> Any:
        backends = [self._library.Backend(kind) for kind in kinds]
        return self._library.Decoder(device_id=device, max_num_cpu_threads=threads, backends=backends)

    def decode(self, files: Sequence[Any], stream: int = 0) -> dict[int, Any]:
        """Return the images of the files that can be decoded, by index; the next call overwrites them.

        Args:
            files: NumPy arrays, uint8, 1-D; None: nothing to decode.
            stream: the CUDA stream that orders the work, on a GPU.
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
