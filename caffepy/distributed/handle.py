"""The handle that a script has of a started operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from caffepy.distributed.arrays import Buffer
from caffepy.parallel.communicators.collectives import Collective, Work

_LOOK_SECONDS = 2.0
"""Seconds between checks for ranks that have left."""


class HandleOwner(Protocol):
    """What a handle needs of the group that started its operation; `base.BaseGroup` has it."""

    timeout: float

    def reporting(self, collective: Collective) -> AbstractContextManager[None]:
        """Put rank and operation before an error's message."""

    def waiting(self, collective: Collective) -> AbstractContextManager[None]:
        """As `reporting`, and the heartbeat says what this rank waits in."""

    def look(self, waits_for: Sequence[int]) -> None:
        """Raise PeerError if a rank that is waited for has left the group."""

    def give_up(self, collective: Collective, waits_for: Sequence[int], seconds: float) -> NoReturn:
        """Raise PeerError, which names the stragglers."""


class Handle:
    """A pending operation. Its arrays must be left alone until it is done.

    Args:
        group: where it was started.
        collective: what was called.
        work: the communicator's.
        buffers: unpacked into their arrays when it is done.
    """

    def __init__(self, group: HandleOwner, collective: Collective, work: Work, buffers: Sequence[Buffer]) -> None:
        self._group = group
        self._collective = collective
        self._work = work
        self._buffers = buffers
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is done; results are in their arrays then.

        Args:
            timeout: seconds; None: the group's. The operation goes on after a wait that was too short.

        Raises:
            PeerError: it did not end in time (the message says for whom it waits), or another rank failed.
            UserError: another rank called something else.
        """
        seconds = self._group.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            if self._done:
                return
            with self._group.waiting(self._collective):
                while not self._finish(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        self._group.give_up(self._collective, self._work.waits_for, seconds)
                    self._group.look(self._work.waits_for)

    def is_completed(self) -> bool:
        """Whether it is done; does not block. Errors as in `wait`."""
        with self._lock:
            if not self._done:
                with self._group.reporting(self._collective):
                    self._finish(0.0)
            return self._done

    def _finish(self, seconds: float) -> bool:
        if self._work.wait(seconds):
            for buffer in self._buffers:
                buffer.unpack()
            self._buffers = ()
            self._done = True
        return self._done
