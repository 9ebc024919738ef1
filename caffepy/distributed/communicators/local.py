"""The local communicator: threads of one process, through one shared object. The others are tested against it.

`SharedScores` is the buffer in which these threads add up their test scores.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from caffepy.backend.types import Array
from caffepy.distributed.communicators.communicator import Collective, FinishedWork, Op, PendingCollective, ReduceOp
from caffepy.distributed.communicators.store_communicator import StoreCommunicator
from caffepy.distributed.store.store import LocalControlChannel, MemoryStore
from caffepy.errors import AbortedError, PeerError
from caffepy.utils.clocks import suspend_aware_seconds

Scores = npt.NDArray[np.float64]


class SharedScores:
    """One row of scores for each solver thread.

    Not synchronised: callers need a barrier between `save` and `total`.

    Args:
        nranks: the number of threads.
    """

    def __init__(self, nranks: int) -> None:
        self._rows: list[Scores] = [np.zeros(0) for _ in range(nranks)]

    def save(self, rank: int, scores: npt.ArrayLike) -> None:
        """Copy the scores (S,) of thread `rank`."""
        self._rows[rank] = np.array(scores, np.float64)

    def rank_scores(self, rank: int) -> Scores:
        """The last scores that thread `rank` saved."""
        return self._rows[rank]

    def total(self) -> Scores:
        """The sum over all threads, added in rank order."""
        total = np.zeros_like(self._rows[0])
        for row in self._rows:
            assert row.shape == total.shape, (row.shape, total.shape)
            total += row
        return total


PATIENCE = 120.0
"""Seconds by which a wait outlasts the watchdog's timeout and what it allows for the first iteration besides, so that
the watchdog speaks first: it knows whom the others wait for."""
_LOOK_SECONDS = 1.0
"""Seconds between checks of the timeout."""


class ThreadGroup:
    """What the threads of one process share: a barrier that can be aborted, and each other's arrays.

    Args:
        size: the number of threads.
        timeout: the watchdog's, in seconds.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        self.size = size
        self.scores = SharedScores(size)
        self.arrays: list[Any] = [None] * size
        self.store = MemoryStore(size)
        self._changed = threading.Condition()
        self._arrived = 0
        self._generation = 0
        self._aborted = False
        self._timeout = timeout + PATIENCE

    def wait(self) -> None:
        """Wait for all threads.

        Raises:
            AbortedError: the group was aborted.
            PeerError: a thread has not come for too long; time in which the process was suspended does not count.
        """
        with self._changed:
            # A number for each barrier: a thread that wakes late must not wait in the next one.
            generation = self._generation
            self._arrived += 1
            if self._arrived == self.size and not self._aborted:
                self._arrived = 0
                self._generation += 1
                self._changed.notify_all()
            end = suspend_aware_seconds() + self._timeout
            while self._generation == generation:
                if self._aborted:
                    raise AbortedError("another solver thread failed")
                remaining = end - suspend_aware_seconds()
                if remaining <= 0:
                    self._aborted = True
                    self._changed.notify_all()
                    raise PeerError(
                        f"a solver thread has waited {self._timeout:.0f} s for the others of its process; "
                        "allow more with --timeout if they only need longer"
                    )
                # Short waits: after a suspension the clock that does not count it must be asked again.
                self._changed.wait(min(remaining, _LOOK_SECONDS))

    def abort(self) -> None:
        """Wake all waiters with AbortedError, now and later."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self.store.fail("another thread failed")


class LocalCommunicator(StoreCommunicator):
    """Host arrays among the threads of one process.

    Blocking sums run over the threads in rank order, each thread adding up its share of the elements: the result
    depends neither on timing nor on which thread is asked.

    Args:
        group: shared by all threads.
        rank: this thread's number.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(LocalControlChannel(group.store, rank), rank, group.size)
        self.group = group

    def start(self, collective: Collective) -> PendingCollective:
        if not collective.blocking or collective.op not in (Op.ALL_REDUCE, Op.BROADCAST, Op.BARRIER):
            return super().start(collective)
        if collective.op is Op.BARRIER:
            self.group.wait()
        elif self.size > 1 and collective.op is Op.BROADCAST:
            assert collective.peer is not None
            self._copy_from(collective.array, collective.peer)
        elif self.size > 1:
            self._reduce_shares(collective.array, collective.operator is ReduceOp.AVG)
        return FinishedWork()

    def _reduce_shares(self, array: Array, average: bool) -> None:
        arrays = self._publish(array)
        share = self._share(array.size)
        # Each thread adds up its share of all arrays and writes it to all: no element has two writers, and the order is
        # that of the ranks.
        total = arrays[0][share].copy()
        for other in arrays[1:]:
            total += other[share]
        if average:
            total /= self.size
        for other in arrays:
            other[share] = total
        self.group.wait()

    def _copy_from(self, array: Array, root: int) -> None:
        arrays = self._publish(array)
        if self.rank != root:
            np.copyto(array, arrays[root])
        self.group.wait()

    def reduce(self, array: Array) -> None:
        """Thread 0's array = the sum over all threads; the others' arrays do not change."""
        if self.size == 1:
            return
        arrays = self._publish(array)
        share = self._share(array.size)
        for other in arrays[1:]:
            arrays[0][share] += other[share]
        self.group.wait()

    def sum(self, values: Any) -> Any:
        self.group.scores.save(self.rank, values)
        self.group.wait()
        # The first barrier: all rows are there. The second: all have read them, before a thread saves its next row.
        total = self.group.scores.total()
        self.group.wait()
        return total

    def abort(self) -> None:
        self.group.abort()

    def close(self) -> None:
        self.group.arrays[self.rank] = None

    def _publish(self, array: Array) -> list[Any]:
        """Exchange arrays with the other threads; one for each, in rank order."""
        self.group.arrays[self.rank] = array
        self.group.wait()
        return self.group.arrays

    def _share(self, count: int) -> slice:
        """The elements that this thread reduces."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
