"""The TCP communicator: processes that share nothing but a store at rank 0. Slow, and needs neither MPI nor NCCL."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np

from caffepy.errors import AbortedError, PeerError
from caffepy.parallel.communicators.collectives import Operation, Operator, Work
from caffepy.parallel.communicators.store_operations import StoreOperations
from caffepy.parallel.store.store import Store


class TcpCommunicator:
    """A `GroupCommunicator` of host arrays among ranks that share a store.

    All numbers go through the process that holds the store.

    Args:
        store: what they share; not closed here.
        rank: this rank.
        size: how many there are.
        timeout: longest wait of the operations that wait themselves, in seconds.
    """

    memory = "host"

    def __init__(self, store: Store, rank: int, size: int, timeout: float = 300.0) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._operations = StoreOperations(store, rank, size)
        self._timeout = timeout
        self._aborted = threading.Event()

    def start(self, operation: Operation) -> Work:
        if self._aborted.is_set():
            raise AbortedError("the communicator was aborted")
        return self._operations.start(operation)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def all_reduce(self, array: Any, average: bool = True) -> None:
        self._run(Operation("all_reduce", array, array, Operator.AVG if average else Operator.SUM))

    def broadcast(self, array: Any, root: int = 0) -> None:
        sends = self.rank == root
        self._run(Operation("broadcast", array if sends else None, None if sends else array, peer=root))

    def barrier(self) -> None:
        self._run(Operation("barrier"))

    def sum(self, values: Any) -> Any:
        total = np.array(values, np.float64)
        self._run(Operation("all_reduce", total, total, Operator.SUM))
        return total

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            with suppress(PeerError):  # rank 0 is gone, and with it all waits
                self._store.fail(f"rank {self.rank} has stopped")

    def close(self) -> None:
        """Nothing: the store belongs to others."""

    def _run(self, operation: Operation) -> None:
        work = self.start(operation)
        if not work.wait(self._timeout):
            raise PeerError(
                f"{operation.name}: rank {self.rank} has waited {self._timeout:g} s for rank "
                f"{', '.join(map(str, work.waits_for))}"
            )
