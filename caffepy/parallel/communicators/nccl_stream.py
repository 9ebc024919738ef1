"""A side stream for all-reduces that make progress while the device computes.

Owns the events by which the two streams wait for each other, and a counter by which the host sees how far the side
stream has come. Its work may be captured together with what surrounds it: the stream joins the capture by waiting for
an event of the capturing stream, and has to be waited for before the capture's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from caffepy.backend.cuda.device import cupy
from caffepy.parallel.communicators.collectives import PolledWork, Work

_NUMBERS = 1024
"""Works that are counted before they are waited for; more than any net has buckets."""


class SideStream:
    """A second stream of a thread.

    Args:
        is_done: whether an event has come; raises what the connection or an abort has to say.
    """

    def __init__(self, is_done: Callable[[Any], bool]) -> None:
        self.is_done = is_done
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._spare_events: list[Any] = []
        self._started = self._waited_for = 0
        self._numbers = cupy.arange(_NUMBERS, dtype="int32")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._completed = np.frombuffer(self._memory, np.int32, 1)
        self._completed[0] = 0

    @property
    def completed(self) -> int:
        """How many works the device has done since all were waited for. Thread-safe.

        Counted anew from 1 with the first work that follows a wait for all of them.
        """
        return int(self._completed[0])

    @contextmanager
    def after_current(self, timed: AbstractContextManager[None]) -> Iterator[SideStreamWork]:
        """Make this the current stream within a `with` block, whose work comes after all that the other stream holds.

        Args:
            timed: entered where the work begins, left where it ends.
        """
        self._started += 1
        number = min(self._started, _NUMBERS - 1)
        work = SideStreamWork(self)
        work.begin.record(cupy.cuda.get_current_stream())
        self._stream.wait_event(work.begin)
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
        work.end.record(self._stream)

    def take_event(self) -> Any:
        """An unused event, so that a capture creates none."""
        return self._spare_events.pop() if self._spare_events else cupy.cuda.Event(disable_timing=True)

    def release(self, *events: Any) -> None:
        """Give the events of a work back, which was waited for."""
        self._spare_events += events
        self._waited_for += 1
        if self._waited_for == self._started:
            self._started = self._waited_for = 0


class SideStreamWork(Work):
    """Work on the side stream, between two events."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self.begin, self.end = stream.take_event(), stream.take_event()

    def wait(self, seconds: float) -> bool:
        """Block the host; not for work that is being captured."""
        done = PolledWork(lambda: self._stream.is_done(self.end)).wait(seconds)
        if done:
            self._stream.release(self.begin, self.end)
        return done

    def synchronize(self, seconds: float = 0.0) -> bool:
        """Have the current stream wait; the host does not."""
        cupy.cuda.get_current_stream().wait_event(self.end)
        self._stream.release(self.begin, self.end)
        return True
