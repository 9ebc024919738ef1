"""A stream beside a solver thread's own, for communication that goes on while the device computes.

Owns the events by which the two wait for each other. Such work may be captured together with what surrounds it: the
stream joins the capture by waiting for an event of the capturing stream, and has to be waited for before its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_graph import CudaStamp


class SideStream:
    """A stream that takes work from a thread whose current stream is another."""

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._spare: list[Any] = []

    @contextmanager
    def after_current(self, timed: bool) -> Iterator[SideWork]:
        """Make this the current stream within a `with` block; what is put on it comes after all that the other holds.

        Args:
            timed: take the times at which the work begins and ends; not while a graph is captured.
        """
        work = SideWork(self._spare)
        work.begin(self._stream, timed)
        with self._stream:
            yield work
        work.end(self._stream, timed)


class SideWork:
    """An `Exchange` on a stream beside the current one.

    Args:
        spare: events that nobody uses at present; taken and given back, so that a capture finds some.
    """

    def __init__(self, spare: list[Any]) -> None:
        self._spare = spare
        self._events = [spare.pop() if spare else cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._stamps: list[CudaStamp] = []

    def begin(self, stream: Any, timed: bool) -> None:
        """Have `stream` wait for all that the current stream holds."""
        self._events[0].record(cupy.cuda.get_current_stream())
        stream.wait_event(self._events[0])
        if timed:
            self._stamps.append(CudaStamp(stream))

    def end(self, stream: Any, timed: bool) -> None:
        """Mark where on `stream` the work ends."""
        self._events[1].record(stream)
        if timed:
            self._stamps.append(CudaStamp(stream))

    def progress(self) -> None:
        """The device needs no help."""

    def finish(self) -> None:
        """Have the current stream wait for the end."""
        cupy.cuda.get_current_stream().wait_event(self._events[1])
        self._spare += self._events
        self._events = []

    def stamps(self) -> tuple[CudaStamp, CudaStamp] | None:
        if not self._stamps:
            return None
        first, last = self._stamps
        return first, last
