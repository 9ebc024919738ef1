"""Which stream the CUDA backend's work goes to, and what a capture is protected from; streams are simulated."""

from __future__ import annotations

import ctypes
import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caffepy.errors import RunError


class Stream:
    """Work that is done when it is waited for, or current within a `with` block.

    Args:
        current: the thread's streams, the last of which is current.
    """

    ptr = 1

    def __init__(self, current: list[Stream]) -> None:
        self.current = current
        self.queued: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        assert self.current.pop() is self

    def synchronize(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class Pointer:
    """An address whose copies are queued."""

    def __init__(self, address: int) -> None:
        self.ptr = address

    def memset_async(self, value: int, size: int, stream: Stream) -> None:
        stream.queued.append(lambda: ctypes.memset(self.ptr, value, size) and None)

    def copy_from_host_async(self, host: int, size: int, stream: Stream) -> None:
        content = ctypes.string_at(host, size)
        stream.queued.append(lambda: ctypes.memmove(self.ptr, content, size) and None)

    def copy_from_device_async(self, source: Pointer, size: int, stream: Stream) -> None:
        stream.queued.append(lambda: ctypes.memmove(self.ptr, source.ptr, size) and None)


class DeviceArray(np.ndarray):
    """What CuPy's arrays have."""

    @property
    def data(self) -> Pointer:  # type: ignore[override]
        return Pointer(self.ctypes.data)


@pytest.fixture
def current() -> list[Stream]:
    """The streams of the thread; the first is the caller's own."""
    streams: list[Stream] = []
    streams.append(Stream(streams))
    return streams


@pytest.fixture
def backend(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, current: list[Stream]) -> Any:
    """A backend whose stream is not the current one."""
    made, memory, copy = (importlib.import_module(f"caffepy.backend.cuda.{n}") for n in ("backend", "memory", "copy"))
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda: current[-1]), get_default_memory_pool=lambda: pool
    )
    taken: list[Stream] = []
    pool = SimpleNamespace(free_all_blocks=lambda stream: None)

    def allocate(shape: tuple[int, ...], dtype: str = "float32") -> Any:
        taken.append(current[-1])
        return np.full(shape, 77, dtype).view(DeviceArray)

    def kernel(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        array, bits, _ = arguments
        current[-1].queued.append(lambda: np.ndarray.fill(array, np.array(bits).view(array.dtype)[()]))

    def move(source: Any, destination: Any, add: bool) -> None:
        current[-1].queued.append(lambda: np.copyto(destination, destination * add + source))

    for module in (made, memory, copy):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(memory, "allocate", allocate)
    monkeypatch.setattr(memory, "library_kernel", lambda *_: kernel)
    monkeypatch.setattr(copy, "_move", move)
    backend = made.CudaBackend.__new__(made.CudaBackend)
    backend.stream, backend._device, backend._scratch = Stream(current), nullcontext(), None
    backend.taken = taken
    return backend


def run_others_first(current: list[Stream], backend: Any) -> None:
    """Finish the work of all streams, the backend's last: its device is busy."""
    current[0].synchronize()
    backend.stream.synchronize()


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("name", ["fill", "from_host", "copy", "add"])
def test_what_is_written_to_new_memory_comes_behind_its_zeros(
    backend: Any, current: list[Stream], name: str, active: bool
) -> None:
    """Also where a net is built outside of `activate`: BatchNorm's factors were zeros on a busy GPU."""
    with backend.activate() if active else nullcontext():
        array, other = backend.zeros((5,)), backend.zeros((5,))
        backend.fill(other, 3)
        work = {
            "fill": lambda: backend.fill(array, 3),
            "from_host": lambda: backend.from_host(np.full(5, 3, np.float32), array),
            "copy": lambda: backend.copy(other, array),
            "add": lambda: backend.add(other, array),
        }
        work[name]()
    run_others_first(current, backend)
    np.testing.assert_array_equal(np.array(array), np.full(5, 3))


def test_memory_is_taken_for_the_backends_stream(backend: Any, current: list[Stream]) -> None:
    """CuPy keeps what is freed by stream; another stream's may still be written to."""
    backend.zeros((5,))
    backend.arena(100)
    assert backend.taken == [backend.stream] * 2


@pytest.fixture
def graph(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """caffepy.backend.cuda.graph on a CUDA that captures nothing."""
    module = importlib.import_module("caffepy.backend.cuda.graph")

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(f"CUDA error {status}")
            self.status = status

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, streamCaptureModeThreadLocal=1)
    driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {"status": 0}))
    cuda = SimpleNamespace(runtime=runtime, driver=driver, using_allocator=lambda _: nullcontext())
    monkeypatch.setattr(module, "cupy", SimpleNamespace(cuda=cuda))
    yield module
    assert gc.isenabled()


class CapturingStream:
    """A stream whose capture ends well, or with an error of CUDA's."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def begin_capture(self, mode: int) -> None:
        """Captures nothing."""

    def end_capture(self) -> Any:
        if self._error is not None:
            raise self._error
        return SimpleNamespace(upload=lambda stream: None)


def test_no_garbage_is_collected_while_any_thread_captures(graph: Any) -> None:
    """Destructors of what an earlier net left would call CUDA in the middle of it."""
    second_began, first_ended, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        seen.append(gc.isenabled())
        assert second_began.wait(300)

    def second() -> None:
        second_began.set()
        assert first_ended.wait(300)
        seen.append(gc.isenabled())

    threads = [threading.Thread(target=graph.CudaGraph, args=(CapturingStream(), [work])) for work in (first, second)]
    threads[0].start()
    threads[1].start()
    threads[0].join(300)
    first_ended.set()
    threads[1].join(300)
    assert seen == [False, False] and gc.isenabled()


def test_a_collector_that_the_program_has_stopped_stays_so(graph: Any) -> None:
    gc.disable()
    try:
        graph.CudaGraph(CapturingStream(), [lambda: None])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("status", [900, 901, 908])
def test_a_disturbed_capture_can_be_tried_again(graph: Any, status: int) -> None:
    """The runners of graphs take a RunError for a reason to try again behind another pass."""
    error = graph.cupy.cuda.runtime.CUDARuntimeError(status)
    with pytest.raises(RunError, match=f"CUDA error {status}"):
        graph.CudaGraph(CapturingStream(error), [lambda: None])


def test_other_errors_of_cuda_are_no_matter_of_the_capture(graph: Any) -> None:
    error = graph.cupy.cuda.runtime.CUDARuntimeError(700)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        graph.CudaGraph(CapturingStream(error), [lambda: None])
