"""What a capture is protected from; CUDA is simulated."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.errors import RunError


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
