"""Threads times ranks: the threads of a process reduce among themselves, then one of them speaks for all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from caffepy.parallel.communicator import GroupCommunicator
from caffepy.parallel.compression import Halves
from caffepy.parallel.local import LocalCommunicator
from caffepy.parallel.operations import Finished, Operation, Operator, Work

_LOOK_SECONDS = 1.0
"""How long one look at an unfinished exchange may last; a communicator that was aborted ends it by an error."""


class HierarchicalCommunicator:
    """A `Communicator` of host arrays among all threads of all ranks.

    Its rank is ranks.rank * local.size + local.rank. Thread 0 of each process alone calls `ranks`.

    Args:
        local: connects the threads of this process.
        ranks: connects the processes.
        compress: send the averages that are begun from process to process as float16.
        apart: the processes are on several machines. On one, MPI copies through memory, with the processors that
            compute, so that averages are made when they are begun: with Open MPI on two cores a non-blocking sum of
            233 MiB took 350 ms, a blocking one 134.
    """

    def __init__(
        self, local: LocalCommunicator, ranks: GroupCommunicator, compress: bool = False, apart: bool = True
    ) -> None:
        self._local = local
        self._ranks = ranks
        self._leads = local.rank == 0
        self.rank = ranks.rank * local.size + local.rank
        self.size = ranks.size * local.size
        self._halves = Halves(np, self.size) if compress else None
        self.compresses = compress
        self.moves_by_itself = apart

    def all_reduce(self, array: Any, average: bool = True) -> None:
        self._local.reduce(array)
        if self._leads:
            self._ranks.all_reduce(array, average=False)
            if average:
                array /= self.size
        self._local.broadcast(array)

    def begin_average(self, array: Any, timed: AbstractContextManager[None]) -> HierarchicalExchange:
        """`OverlappingCommunicator.begin_average`: what goes on while the threads compute is the ranks' part."""
        exchange = HierarchicalExchange(self._local, array, self.size, self._halves, timed)
        self._local.reduce(array)
        if self._leads:
            exchange.begin(self._ranks, blocking=not self.moves_by_itself)
        return exchange

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
    """An average whose threads have added up their part.

    Args:
        local: connects the threads of this process.
        array: this thread's array.
        size: devices in all.
        halves: makes what is sent; None: the array itself is.
        timed: entered now, left when the ranks' part has ended.
    """

    def __init__(
        self,
        local: LocalCommunicator,
        array: Any,
        size: int,
        halves: Halves | None,
        timed: AbstractContextManager[None],
    ) -> None:
        self._local = local
        self._array = array
        self._size = size
        self._halves = halves
        self._sent = array
        self._work: Work | None = None
        self._ended = False
        self._timed = ExitStack()
        self._timed.enter_context(timed)

    def begin(self, ranks: GroupCommunicator, blocking: bool) -> None:
        """Begin the ranks' sum, or make it at once if `blocking`; called by the thread that leads."""
        if self._halves is not None:
            self._sent = self._halves.shrink(self._array)
        elif blocking:
            ranks.all_reduce(self._array, average=False)
            self._work = Finished()
            self._timed.close()
            return
        self._work = ranks.start(Operation("all_reduce", self._sent, self._sent, Operator.SUM, compact=True))

    def progress(self, seconds: float = 0.0) -> None:
        if self._work is not None and not self._ended:
            self._ended = self._work.wait(seconds)

    def finish(self) -> None:
        if self._work is not None:
            while not self._ended:
                self.progress(_LOOK_SECONDS)
            if self._halves is None:
                self._array /= self._size
            else:
                self._halves.widen(self._sent, self._array)
        self._local.broadcast(self._array)
        self._timed.close()
