"""Times that a GPU takes itself, so that captured work can be timed as well."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import launch_blocks, library_kernel
from caffepy.backend.cuda.device import cupy


class CudaTimer:
    """A `DeviceTimer` on one GPU's clock; its calls go on the current stream.

    Args:
        places: how many times are taken.
        stream: the backend's.
    """

    def __init__(self, places: int, stream: Any) -> None:
        self._places = places
        self._stream = stream
        self._times = cupy.zeros(2 * places, "int64")
        # Kernels are loaded now: within a capture that may be refused.
        self.start(0)
        self.stop(0)
        self.reset()

    def start(self, place: int) -> None:
        """From here on time passes for a place."""
        launch_blocks(library_kernel("timer", "start"), (1,), (1,), (self._times, np.int32(place)))

    def stop(self, place: int) -> None:
        """Up to here it has passed."""
        arguments = (self._times, np.int32(place), np.int32(self._places))
        launch_blocks(library_kernel("timer", "stop"), (1,), (1,), arguments)

    def reset(self) -> None:
        """Begin with totals of 0."""
        self._times.data.memset_async(0, self._times.nbytes, self._stream)

    def totals(self) -> list[float]:
        """Seconds of each place; waits for the device."""
        return self._seconds()[self._places :]

    def times(self) -> list[float]:
        """When each place was started last, in seconds of the GPU's clock; waits for the device."""
        return self._seconds()[: self._places]

    def _seconds(self) -> list[float]:
        return [float(nanoseconds) * 1e-9 for nanoseconds in cupy.asnumpy(self._times, stream=self._stream)]
