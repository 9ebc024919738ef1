"""CUDA graphs, events, stopwatches, and asynchronous host-device transfers of numbers while graphs run.

Owns pinned memory and events. Capture is thread-local, so several solver threads of a process may capture concurrently.
The stopwatches use the GPU's clock and work in captured graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import launch_blocks, library_kernel
from caffepy.backend.cuda.device import cupy
from caffepy.backend.types import Array, Counter
from caffepy.errors import RunError
from caffepy.utils.garbage_collection import suspended_garbage_collection

IN_FLIGHT = 4
"""Maximum outstanding messages to the device; another one waits for the oldest."""


CAPTURE_ERRORS = range(900, 909)
"""Error codes, common to CUDA's runtime and driver, of an invalidated capture: cudaErrorStreamCaptureUnsupported to
cudaErrorStreamCaptureWrongThread."""


class CudaGraph:
    """A `Graph` of the work that functions queue on a stream, in order.

    Args:
        stream: the capturing stream; no other work may be queued on it meanwhile.
        works: functions that launch kernels on it. They must not allocate; an eager run has allocated their memory.

    Raises:
        RunError: the work cannot be captured, or CUDA reports an invalidated capture; another attempt may succeed.
    """

    def __init__(self, stream: Any, works: Sequence[Callable[[], None]]) -> None:
        self._stream = stream
        # A collection runs in any thread that allocates. In a capturing thread, destructors of cuDNN plans or old
        # graphs would unload modules and free memory, which invalidates the capture.
        with suspended_garbage_collection():
            try:
                self._graph = self._captured(works)
            except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
                if error.status not in CAPTURE_ERRORS:
                    raise
                raise RunError(f"CUDA invalidated the capture of a graph: {error}") from error

    def _captured(self, works: Sequence[Callable[[], None]]) -> Any:
        stream = self._stream
        # Thread-local, because solver threads of other GPUs may allocate or compile meanwhile; in the global mode that
        # would end this capture.
        mode = cupy.cuda.runtime.streamCaptureModeThreadLocal
        stream.begin_capture(mode=mode)
        try:
            # CuPy would allocate from its pool within the capture: memory that it may hand out again while the graph
            # still writes to it.
            with cupy.cuda.using_allocator(_refuse):
                for work in works:
                    work()
        except BaseException:
            _end_quietly(stream)
            raise
        graph = stream.end_capture()
        # Sent to the device now, so that the first launch does not take longer than the later ones.
        graph.upload(stream)
        return graph

    def launch(self) -> None:
        """Launch the captured graph; does not wait for it."""
        self._graph.launch(self._stream)


def _refuse(size: int) -> Any:
    raise RunError(f"device memory ({size} bytes) was requested during a graph capture")


def _end_quietly(stream: Any) -> None:
    """Leave capture mode after a failure, without raising another error."""
    try:
        stream.end_capture()
    except cupy.cuda.runtime.CUDARuntimeError:
        return


class CudaScalars:
    """A `DeviceScalars` in device memory, which kernels read when they run.

    Args:
        stream: the backend's stream.
        values: number of values.
        counters: number of counters.
    """

    def __init__(self, stream: Any, values: int, counters: int) -> None:
        self._stream = stream
        self._floats = -(-values // 2) * 2
        size = 4 * self._floats + 16 * counters
        self._device = cupy.zeros(size, "uint8")
        self.array = self._device[: 4 * self._floats].view("float32")[:values]
        self.values: Sequence[Array | float] = [self.array[i : i + 1].reshape(()) for i in range(values)]
        pairs = self._device[4 * self._floats :].view("uint64")
        self.counters: Sequence[Counter | None] = [pairs[2 * i : 2 * i + 2] for i in range(counters)]
        self._pinned = [cupy.cuda.alloc_pinned_memory(size) for _ in range(IN_FLIGHT)]
        self._host = [np.frombuffer(memory, np.uint8, size) for memory in self._pinned]
        self._sent: deque[Any] = deque()
        self._turn = 0

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Queue a transfer of the numbers before the work that reads them."""
        # A pinned buffer may be written again only when the transfer before it has run. With several, the host works
        # ahead of the device.
        if len(self._sent) == IN_FLIGHT:
            self._sent.popleft().synchronize()
        host = self._host[self._turn]
        host[: 4 * self._floats].view(np.float32)[: len(values)] = values
        if counters:
            host[4 * self._floats :].view(np.uint64)[:] = np.array(counters, np.uint64).reshape(-1)
        self._device.data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream)
        self._sent.append(CudaEvent(self._stream).event)
        self._turn = (self._turn + 1) % IN_FLIGHT


class CudaEvent:
    """A CUDA event."""

    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Wait until the device reaches the event, with the GIL released."""
        self.event.synchronize()


class CudaTimedEvent:
    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event()
        self.event.record(stream)

    def seconds_since(self, earlier: CudaTimedEvent) -> float:
        """Return the device's seconds between the two events; waits for this one."""
        self.event.synchronize()
        return float(cupy.cuda.get_elapsed_time(earlier.event, self.event)) * 1e-3


class CudaAsyncCopy:
    """A small array in transfer to the host.

    Args:
        stream: the backend's stream.
        array: copied in stream order.
    """

    def __init__(self, stream: Any, array: Array) -> None:
        # From pageable memory CUDA would copy synchronously, and the host would wait for the device.
        self._memory = cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1))
        self._host = np.frombuffer(self._memory, array.dtype, array.size).reshape(array.shape)
        array.data.copy_to_host_async(self._host.ctypes.data, array.nbytes, stream)
        self._mark = CudaEvent(stream)

    def get(self) -> Array:
        """Return the array; waits for the transfer."""
        self._mark.wait()
        return self._host


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
