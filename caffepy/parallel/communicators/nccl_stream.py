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
from caffepy.parallel.communicators.collectives import Work, wait_until

_NUMBERS = 1024
"""Works that are counted before they are waited for; more than any net has buckets."""


class SideStream:
    """A second stream of a thread.

    Args:
        is_done: whether an event has come; raises what the connection or an abort has to say.
    """

    def __init__(self, is_done: Callable[[Any], bool]) -> None:
        self._is_done = is_done
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
        work = SideStreamWork(self._spare_events, self._is_done, self._count_wait)
        work.fork(self._stream)
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
        work.record_end(self._stream)

    def _count_wait(self) -> None:
        self._waited_for += 1
        if self._waited_for == self._started:
            self._started = self._waited_for = 0


class SideStreamWork(Work):
    """Work on the side stream.

    Args:
        spare_events: unused events, taken and given back, so that a capture creates none.
        is_done: whether an event has come.
        on_wait: called when it was waited for.
    """

    def __init__(self, spare_events: list[Any], is_done: Callable[[Any], bool], on_wait: Callable[[], None]) -> None:
        self._spare_events = spare_events
        self._is_done = is_done
        self._on_wait = on_wait
        self._events = [spare_events.pop() if spare_events else cupy.cuda.Event(disable_timing=True) for _ in range(2)]

    def fork(self, stream: Any) -> None:
        """Have `stream` wait for all that the current stream holds."""
        self._events[0].record(cupy.cuda.get_current_stream())
        stream.wait_event(self._events[0])

    def record_end(self, stream: Any) -> None:
        """The work ends here on `stream`."""
        self._events[1].record(stream)

    def wait(self, seconds: float) -> bool:
        """Block the host; not for work that is being captured."""
        done = wait_until(lambda: self._is_done(self._events[1]), seconds)
        if done:
            self._release()
        return done

    def synchronize(self, seconds: float = 0.0) -> bool:
        """Have the current stream wait; the host does not."""
        cupy.cuda.get_current_stream().wait_event(self._events[1])
        self._release()
        return True

    def _release(self) -> None:
        self._spare_events += self._events
        self._events = []
        self._on_wait()
