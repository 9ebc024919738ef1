"""A stream beside a solver thread's own, for communication that goes on while the device computes.

Owns the events by which the two wait for each other, and a number by which the host sees how far the stream has come.
Such work may be captured together with what surrounds it: the stream joins the capture by waiting for an event of the
capturing stream, and has to be waited for before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from caffepy.backend.cuda.device import cupy

_NUMBERS = 1024
"""Pieces of work that are counted before they are waited for; more than any net has parameters' buckets."""


class SideStream:
    """A stream that takes work from a thread whose current stream is another."""

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._spare: list[Any] = []
        self._begun = self._finished = 0
        self._numbers = cupy.arange(_NUMBERS, dtype="int32")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._reached = np.frombuffer(self._memory, np.int32, 1)
        self._reached[0] = 0

    @property
    def reached(self) -> int:
        """How many pieces of work the device has done since they were waited for together; by any thread, at any time.

        Counted anew from 1 with the first piece that follows a wait for all of them.
        """
        return int(self._reached[0])

    @contextmanager
    def after_current(self, timed: AbstractContextManager[None]) -> Iterator[SideWork]:
        """Make this the current stream within a `with` block; what is put on it comes after all that the other holds.

        Args:
            timed: entered where the work begins, left where it ends.
        """
        self._begun += 1
        number = min(self._begun, _NUMBERS - 1)
        work = SideWork(self._spare, self._count_finished)
        work.begin(self._stream)
        with self._stream:
            with timed:
                yield work
            cupy.cuda.runtime.memcpyAsync(
                self._memory.ptr,
                self._numbers.data.ptr + 4 * number,
                4,
                cupy.cuda.runtime.memcpyDeviceToHost,
                self._stream.ptr,
            )
        work.end(self._stream)

    def _count_finished(self) -> None:
        self._finished += 1
        if self._finished == self._begun:
            self._begun = self._finished = 0


class SideWork:
    """An `Exchange` on a stream beside the current one.

    Args:
        spare: events that nobody uses at present; taken and given back, so that a capture finds some.
        on_finish: called when it was waited for.
    """

    def __init__(self, spare: list[Any], on_finish: Callable[[], None]) -> None:
        self._spare = spare
        self._on_finish = on_finish
        self._events = [spare.pop() if spare else cupy.cuda.Event(disable_timing=True) for _ in range(2)]

    def begin(self, stream: Any) -> None:
        """Have `stream` wait for all that the current stream holds."""
        self._events[0].record(cupy.cuda.get_current_stream())
        stream.wait_event(self._events[0])

    def end(self, stream: Any) -> None:
        """Event where on `stream` the work ends."""
        self._events[1].record(stream)

    def progress(self) -> None:
        """The device needs no help."""

    def finish(self) -> None:
        """Have the current stream wait for the end."""
        cupy.cuda.get_current_stream().wait_event(self._events[1])
        self._spare += self._events
        self._events = []
        self._on_finish()
