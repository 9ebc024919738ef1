"""Threads times ranks: the threads of a process reduce among themselves, then one of them speaks for all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from caffepy.parallel.communicators.collectives import Finished, Operation, Operator, Work
from caffepy.parallel.communicators.communicator import GroupCommunicator
from caffepy.parallel.communicators.compression import Halves, host_compressor
from caffepy.parallel.communicators.local import LocalCommunicator
from caffepy.parallel.communicators.shared_memory import SharedSums

_LOOK_SECONDS = 1.0
"""How long one look at an unfinished exchange may last; a communicator that was aborted ends it by an error."""


class HierarchicalCommunicator:
    """A `Communicator` of host arrays among all threads of all ranks.

    Its rank is ranks.rank * local.size + local.rank. Thread 0 of each process alone calls `ranks`.

    Args:
        local: connects the threads of this process.
        ranks: connects the processes.
        compress: how the averages that are begun travel from process to process, one of `options.COMPRESSIONS`.
        apart: the processes are on several machines. On one, MPI copies through memory, with the processors that
            compute, so that averages are made when they are begun: with Open MPI on two cores a non-blocking sum of
            233 MiB took 350 ms, a blocking one 134.
        shared: sums in memory that the processes share; for one machine, and without `compress`.
    """

    def __init__(
        self,
        local: LocalCommunicator,
        ranks: GroupCommunicator,
        compress: str = "none",
        apart: bool = True,
        shared: SharedSums | None = None,
    ) -> None:
        self._local = local
        self._ranks = ranks
        self._shared = shared
        self._apart = apart
        self._leads = local.rank == 0
        self.rank = ranks.rank * local.size + local.rank
        self.size = ranks.size * local.size
        self._halves = host_compressor(compress, self.size)
        self.compresses = self._halves is not None
        self.overlaps_compute = apart

    def allocate_gradients(self, count: int) -> Any | None:
        """Memory for gradients whose averages are made fastest; called by all threads of all ranks, before those.

        Args:
            count: float32 numbers.

        Returns:
            Zeros, (count,), for the thread that speaks for its process; None for the others, and where any will do.
        """
        memory = self._shared.allocate(count) if self._shared is not None and self._leads else None
        placed = self._local.sum([float(memory is not None)])[0] > 0
        # The threads of a process meet at every part: only where there is one nobody waits for anybody.
        self.overlaps_compute = self._apart or (placed and self._local.size == 1)
        return memory

    def all_reduce(self, array: Any, average: bool = True) -> None:
        self._local.reduce(array)
        if self._leads:
            work = self._begin_shared(array, average)
            if work is not None:
                wait_for(work)
            else:
                self._ranks.all_reduce(array, average=False)
                if average:
                    array /= self.size
        self._local.broadcast(array)

    def _begin_shared(self, array: Any, average: bool) -> Work | None:
        """The ranks' sum or average in memory that they share; None where the array does not lie there."""
        if self._shared is None or not self._shared.holds(array):
            return None
        return self._shared.begin(array, 1 / self.size if average else 1.0)

    def all_reduce_async(self, array: Any, timed: AbstractContextManager[None]) -> HierarchicalExchange:
        """`OverlappingCommunicator.all_reduce_async`: what goes on while the threads compute is the ranks' part."""
        exchange = HierarchicalExchange(self._local, array, self.size, self._halves, timed)
        self._local.reduce(array)
        if self._leads:
            work = self._begin_shared(array, average=True)
            if work is not None:
                exchange.go_on(work, averages=True)
            else:
                exchange.begin(self._ranks, blocking=not self._apart)
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
        self._averages = False
        self._ended = False
        self._timed = ExitStack()
        self._timed.enter_context(timed)

    def begin(self, ranks: GroupCommunicator, blocking: bool) -> None:
        """Begin the ranks' sum, or make it at once if `blocking`; called by the thread that leads."""
        if self._halves is not None:
            self._sent = self._halves.shrink(self._array)
        elif blocking:
            ranks.all_reduce(self._array, average=False)
            self.go_on(Finished(), averages=False)
            self.progress()
            return
        work = ranks.start(Operation("all_reduce", self._sent, self._sent, Operator.SUM, compact=True))
        self.go_on(work, averages=False)

    def go_on(self, work: Work, averages: bool) -> None:
        """Take over a work that makes the array the ranks' sum or average; called by the thread that leads."""
        self._work, self._averages = work, averages

    def progress(self, seconds: float = 0.0) -> None:
        if self._work is not None and not self._ended:
            self._ended = self._work.wait(seconds)
            if self._ended:
                self._timed.close()

    def finish(self) -> None:
        if self._work is not None:
            while not self._ended:
                self.progress(_LOOK_SECONDS)
            if self._halves is not None:
                self._halves.widen(self._sent, self._array)
            elif not self._averages:
                self._array /= self._size
        self._local.broadcast(self._array)
        self._timed.close()


def wait_for(work: Work) -> None:
    """Wait until a work has ended, however long that takes."""
    while not work.wait(_LOOK_SECONDS):
        continue
