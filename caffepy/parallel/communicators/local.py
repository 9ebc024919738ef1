"""The local communicator: threads of one process, through one shared object. The others are tested against it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from caffepy.awake import awake_seconds
from caffepy.errors import AbortedError, PeerError
from caffepy.parallel.communicators.collectives import Operation, Work
from caffepy.parallel.communicators.store_operations import StoreOperations
from caffepy.parallel.shared_scores import SharedScores
from caffepy.parallel.store.store import MemoryStore, RankStore

PATIENCE = 120.0
"""Seconds by which a wait outlasts the watchdog's timeout and what it allows for the first iteration besides, so that
the watchdog speaks first: it knows whom the others wait for."""
_LOOK_SECONDS = 1.0
"""How long a thread waits before it looks how long it has waited."""


class LocalGroup:
    """What the threads of one process share: a barrier that can be broken, and each other's arrays.

    Args:
        size: the number of threads.
        timeout: the watchdog's, in seconds.
        scores: the test scores' buffer; made if not given.
    """

    def __init__(self, size: int, timeout: float = 300.0, scores: SharedScores | None = None) -> None:
        self.size = size
        self.scores = scores or SharedScores(size)
        self.arrays: list[Any] = [None] * size
        self.store = MemoryStore(size)
        self._changed = threading.Condition()
        self._come = 0
        self._turn = 0
        self._aborted = False
        self._timeout = timeout + PATIENCE

    def wait(self) -> None:
        """Wait for all threads.

        Raises:
            AbortedError: the group was aborted.
            PeerError: a thread has not come for too long; time in which the process was suspended does not count.
        """
        with self._changed:
            turn = self._turn
            self._come += 1
            if self._come == self.size and not self._aborted:
                self._come = 0
                self._turn += 1
                self._changed.notify_all()
            end = awake_seconds() + self._timeout
            while self._turn == turn:
                if self._aborted:
                    raise AbortedError("another solver thread failed")
                left = end - awake_seconds()
                if left <= 0:
                    self._aborted = True
                    self._changed.notify_all()
                    raise PeerError(
                        f"a solver thread has waited {self._timeout:.0f} s for the others of its process; "
                        "allow more with --timeout if they only need longer"
                    )
                self._changed.wait(min(left, _LOOK_SECONDS))

    def abort(self) -> None:
        """End all waits, now and later."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self.store.fail("another thread failed")


class LocalCommunicator:
    """A `GroupCommunicator` of host arrays among the threads of one process.

    Sums run over the threads in the order of their ranks, each thread doing its part of the elements: the result
    depends neither on timing nor on which thread is asked.

    Args:
        group: shared by all threads.
        rank: this thread's number.
    """

    memory = "host"

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self._operations = StoreOperations(RankStore(group.store, rank), rank, group.size)

    def start(self, operation: Operation) -> Work:
        return self._operations.start(operation)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def all_reduce(self, array: Any, average: bool = True) -> None:
        if self.size == 1:
            return
        arrays = self._publish(array)
        part = self._part(array.size)
        total = arrays[0][part].copy()
        for other in arrays[1:]:
            total += other[part]
        if average:
            total /= self.size
        for other in arrays:
            other[part] = total
        self.group.wait()

    def reduce(self, array: Any) -> None:
        """Thread 0's array = the sum over all threads; the others' arrays are left alone."""
        if self.size == 1:
            return
        arrays = self._publish(array)
        part = self._part(array.size)
        for other in arrays[1:]:
            arrays[0][part] += other[part]
        self.group.wait()

    def broadcast(self, array: Any, root: int = 0) -> None:
        if self.size == 1:
            return
        arrays = self._publish(array)
        if self.rank != root:
            np.copyto(array, arrays[root])
        self.group.wait()

    def barrier(self) -> None:
        self.group.wait()

    def sum(self, values: Any) -> Any:
        self.group.scores.save(self.rank, values)
        self.group.wait()
        total = self.group.scores.total()
        self.group.wait()
        return total

    def abort(self) -> None:
        self.group.abort()

    def close(self) -> None:
        self.group.arrays[self.rank] = None

    def _publish(self, array: Any) -> list[Any]:
        """Show the others this thread's array and return all of theirs."""
        self.group.arrays[self.rank] = array
        self.group.wait()
        return self.group.arrays

    def _part(self, count: int) -> slice:
        """The elements that this thread adds up."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)
