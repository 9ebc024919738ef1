"""Stopwatches on the GPU's clock that work in captured graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import launch_blocks, library_kernel
from caffepy.backend.cuda.device import cupy


class CudaTimer:
    """A `DeviceTimer` on one GPU's clock; its calls are queued on the current stream.

    Args:
        count: number of stopwatches.
        stream: the backend's stream.
    """

    def __init__(self, count: int, stream: Any) -> None:
        self._count = count
        self._stream = stream
        self._times = cupy.zeros(2 * count, "int64")
        # Load the kernels now; a capture may refuse it.
        self.start(0)
        self.stop(0)
        self.reset()

    def start(self, index: int) -> None:
        launch_blocks(library_kernel("timer", "start"), (1,), (1,), (self._times, np.int32(index)))

    def stop(self, index: int) -> None:
        arguments = (self._times, np.int32(index), np.int32(self._count))
        launch_blocks(library_kernel("timer", "stop"), (1,), (1,), arguments)

    def reset(self) -> None:
        self._times.data.memset_async(0, self._times.nbytes, self._stream)

    def totals(self) -> list[float]:
        return self._seconds()[self._count :]

    def times(self) -> list[float]:
        """Return each stopwatch's last start, in seconds of the GPU's clock; waits for the device."""
        return self._seconds()[: self._count]

    def _seconds(self) -> list[float]:
        return [float(nanoseconds) * 1e-9 for nanoseconds in cupy.asnumpy(self._times, stream=self._stream)]
