"""Threads times ranks: the threads of a process reduce among themselves, then one of them speaks for all of them."""

from __future__ import annotations

from typing import Any

from caffepy.parallel.communicator import Communicator
from caffepy.parallel.local import LocalCommunicator


class HierarchicalCommunicator:
    """A `Communicator` of host arrays among all threads of all ranks.

    Its rank is ranks.rank * local.size + local.rank. Thread 0 of each process alone calls `ranks`.

    Args:
        local: connects the threads of this process.
        ranks: connects the processes.
    """

    def __init__(self, local: LocalCommunicator, ranks: Communicator) -> None:
        self._local = local
        self._ranks = ranks
        self._leads = local.rank == 0
        self.rank = ranks.rank * local.size + local.rank
        self.size = ranks.size * local.size

    def all_reduce(self, array: Any, average: bool = True) -> None:
        self._local.reduce(array)
        if self._leads:
            self._ranks.all_reduce(array, average=False)
            if average:
                array /= self.size
        self._local.broadcast(array)

    def broadcast(self, array: Any, root: int = 0) -> None:
        process, thread = divmod(root, self._local.size)
        if process == self._ranks.rank and thread != 0:
            self._local.broadcast(array, thread)
        if self._leads:
            self._ranks.broadcast(array, process)
        self._local.broadcast(array)

    def barrier(self) -> None:
        self._local.barrier()
        if self._leads:
            self._ranks.barrier()
        self._local.barrier()

    def sum(self, values: Any) -> Any:
        total = self._local.sum(values)
        if self._leads:
            total = self._ranks.sum(total)
        self._local.broadcast(total)
        return total

    def abort(self) -> None:
        self._local.abort()
        self._ranks.abort()

    def close(self) -> None:
        self._local.close()
        if self._leads:
            self._ranks.close()
