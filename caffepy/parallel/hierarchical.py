"""Threads times ranks: the threads of a process reduce among themselves, then one of them speaks for all of them."""

from __future__ import annotations

from typing import Any

from caffepy.parallel.communicator import GroupCommunicator
from caffepy.parallel.local import LocalCommunicator
from caffepy.parallel.operations import Operation, Operator, Work

_LOOK_SECONDS = 1.0
"""How long one look at an unfinished exchange may last; a communicator that was aborted ends it by an error."""


class HierarchicalCommunicator:
    """A `Communicator` of host arrays among all threads of all ranks.

    Its rank is ranks.rank * local.size + local.rank. Thread 0 of each process alone calls `ranks`.

    Args:
        local: connects the threads of this process.
        ranks: connects the processes.
    """

    def __init__(self, local: LocalCommunicator, ranks: GroupCommunicator) -> None:
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

    def begin_average(self, array: Any) -> HierarchicalExchange:
        """`OverlappingCommunicator.begin_average`: what goes on while the threads compute is the ranks' part."""
        self._local.reduce(array)
        work = self._ranks.start(Operation("all_reduce", array, array, Operator.SUM)) if self._leads else None
        return HierarchicalExchange(self._local, work, array, self.size)

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


class HierarchicalExchange:
    """An average that was begun.

    Args:
        local: connects the threads of this process.
        work: the ranks' sum; None for threads that do not lead.
        array: this thread's array.
        size: devices in all.
    """

    def __init__(self, local: LocalCommunicator, work: Work | None, array: Any, size: int) -> None:
        self._local = local
        self._work = work
        self._array = array
        self._size = size

    def progress(self) -> None:
        if self._work is not None:
            self._work.wait(0.0)

    def finish(self) -> None:
        if self._work is not None:
            while not self._work.wait(_LOOK_SECONDS):
                self.progress()
            self._array /= self._size
        self._local.broadcast(self._array)
