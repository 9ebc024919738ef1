"""The contract of all communicators: transports implement `start`, `abort` and `close`, and declare what they can do.

`local.py` connects the threads of one process, `mpi.py` processes through host memory, `hierarchical.py` the threads of
several processes, `store_communicator.py` processes that share a store (over TCP), `nccl.py` GPUs. All ranks start the
same collectives in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from caffepy.backend.types import Array
from caffepy.distributed.communicators.collectives import Collective, Op, PendingCollective, ReduceOp
from caffepy.errors import PeerError


class Communicator(ABC):
    """One rank's end of a group.

    `abort` may be called from any thread: it wakes all waiters, and every later call raises AbortedError.

    Args:
        rank: from 0.
        size: the number of ranks.
        timeout: longest wait of the blocking helpers, in seconds; None: until `abort`.
    """

    memory = "host"
    """Where its arrays are: ``host`` or ``gpu``."""
    capturable = False
    """Whether its collectives may be captured in a CUDA graph."""
    asynchronous = False
    """Whether `all_reduce_async` is supported: it returns before the other ranks have started theirs."""
    overlaps = False
    """Whether a started all-reduce makes progress while the device computes."""
    compresses = False
    """Whether `all_reduce_async` sends two bytes for each number; `all_reduce` never does."""

    def __init__(self, rank: int, size: int, timeout: float | None = None) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout

    @abstractmethod
    def start(self, collective: Collective) -> PendingCollective:
        """Start a collective or message.

        Raises:
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Wake all waiters of this process with AbortedError, now and later. Thread-safe, idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport. Idempotent."""

    @property
    def completed(self) -> int | None:
        """How many all-reduces of `all_reduce_async` the device has done in this backward pass; None where unknown.

        Thread-safe: the watchdog's message names the bucket by it.
        """
        return None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new contiguous array in `memory`."""
        return np.empty(shape, dtype)

    def allocate_gradients(self, count: int) -> Array | None:
        """A float32 buffer (count,) that this transport reduces fastest, filled with 0; None if any will do.

        Called by all ranks before their first all-reduce. May change `overlaps`.
        """
        return None

    def wait_on_device(self, wait: Callable[[], None] | None = None) -> None:
        """Block the host until `wait` returns, or without it until the current stream is idle.

        On GPUs an eager rank must not run ahead of its peers, and `abort` ends the wait. Host arrays are ready anyway.

        Raises:
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """
        if wait is not None:
            wait()

    def all_reduce(self, array: Array, average: bool = True) -> None:
        """array = the mean, or the sum, over all ranks, in place: (P,), contiguous, equal dtype everywhere."""
        self._run(Collective(Op.ALL_REDUCE, array, array, ReduceOp.AVG if average else ReduceOp.SUM, blocking=True))

    def all_reduce_async(self, array: Array, timed: AbstractContextManager[None]) -> PendingCollective:
        """Start array = the mean over all ranks, if `asynchronous`; all ranks synchronize theirs in the same order.

        Args:
            array: (P,), contiguous.
            timed: entered where the all-reduce begins and left where it ends, with its stream current.
        """
        return self.start(Collective(Op.ALL_REDUCE, array, array, ReduceOp.AVG, overlap=timed))

    def broadcast(self, array: Array, root: int = 0) -> None:
        """array = the array of rank `root`, in place."""
        sent, received = (array, None) if self.rank == root else (None, array)
        self._run(Collective(Op.BROADCAST, sent, received, peer=root, blocking=True))

    def barrier(self) -> None:
        """Block the host until all ranks have called it."""
        self._run(Collective(Op.BARRIER, blocking=True))

    def sum(self, values: Any) -> Any:
        """The sum of all ranks' float64 host arrays, added in rank order; a new array."""
        own = np.ascontiguousarray(values, np.float64)
        rows = np.empty((self.size, *np.shape(values)), np.float64)
        self._run(Collective(Op.ALL_GATHER, own, rows, blocking=True))
        return np.add.reduce(rows, axis=0)

    def _run(self, collective: Collective) -> None:
        work = self.start(collective)
        if self._timeout is None:
            work.synchronize()
        elif not work.synchronize(self._timeout):
            ranks = ", ".join(map(str, work.waits_for))
            name = collective.op.value
            raise PeerError(f"{name}: rank {self.rank} has waited {self._timeout:g} s for rank {ranks}")
