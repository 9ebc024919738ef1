"""Frames of a video file or of a camera, by OpenCV."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import as_channels_first, opencv
from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.files import working_folder


class VideoSource:
    """Frames in their order. One thread reads at a time.

    Args:
        path: the file; None: a camera.
        device: number of the camera.

    Raises:
        DataError: it cannot be opened, or has no frames.
    """

    index = None

    def __init__(self, path: Path | None, device: int = 0) -> None:
        self.description = f"camera {device}" if path is None else f"video '{path}'"
        self.is_camera = path is None
        self._target: str | int = device if path is None else os.fspath(path)
        self._lock = Lock()
        self._next = 0
        if path is not None and not os.path.isfile(path):
            raise DataError(f"{self.description} does not exist or is no file (looked from {working_folder()})")
        self._capture: Any
        self._open()
        frames = 0 if path is None else int(self._capture.get(opencv().CAP_PROP_FRAME_COUNT))
        self._length = frames if frames > 0 else sys.maxsize
        self._first: NDArray[np.uint8] | None = None
        try:
            self._first = self.frame(0)
        except DataError as error:
            self.close()
            raise DataError(f"{self.description}: frame 0 {error}") from error

    def _open(self) -> None:
        self._capture = opencv().VideoCapture(self._target)
        self._next = 0
        if not self._capture.isOpened():
            raise DataError(f"{self.description} cannot be opened by OpenCV")

    def __len__(self) -> int:
        """Frames; a huge number where that is not known."""
        return self._length

    def frame(self, number: int) -> NDArray[np.uint8]:
        """A frame (C, H, W). A camera gives the present one, and frame 0 twice: a net learns its shape from it.

        Raises:
            DataError: there is none. The message continues a sentence that begins with the frame's name.
        """
        with self._lock:
            if number == 0 and self._first is not None:
                return self._first
            if not self.is_camera:
                self._go_to(number)
            done, image = self._capture.read()
            self._next += 1
            if not done or image is None:
                raise DataError("cannot be read" if self.is_camera else "is not there: the video has ended")
            return as_channels_first(image)

    def _go_to(self, number: int) -> None:
        """Frames are decoded up to the wanted one: seeking is inexact in many formats."""
        if number < self._next:
            self._capture.release()
            self._open()
        while self._next < number:
            if not self._capture.grab():
                raise DataError("is not there: the video has ended")
            self._next += 1

    def fingerprint(self) -> dict[str, str]:
        first = b"" if self._first is None or self.is_camera else np.ascontiguousarray(self._first).tobytes()
        return {"the number of frames": str(len(self)), "the hash of the first frame": hash_of(first)}

    def close(self) -> None:
        """Release the file or camera. Idempotent."""
        with self._lock:
            capture, self._capture = self._capture, None
        if capture is not None:
            capture.release()
