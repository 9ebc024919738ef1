"""Threads times ranks: the threads of a process reduce among themselves, then thread 0 speaks for all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

from caffepy.backend.types import Array
from caffepy.parallel.communicators.collectives import Collective, FinishedWork, Op, Operator, Work
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.compression import Fp16Compressor, host_compressor
from caffepy.parallel.communicators.local import LocalCommunicator
from caffepy.parallel.communicators.shared_memory import SharedSums


class HierarchicalCommunicator(Communicator):
    """Host arrays among all threads of all ranks: all-reduce, broadcast, barrier and sum.

    Its rank is ranks.rank * local.size + local.rank. Only thread 0 of each process, the local leader, calls `ranks`.

    Args:
        local: connects the threads of this process.
        ranks: connects the processes.
        compress: how `all_reduce_async` travels from process to process, one of `defaults.COMPRESSIONS`.
        inter_node: the processes are on several machines. On one, MPI copies with the cores that compute, so its sums
            are blocking ones.
        shared: sums in memory that the processes share; for one machine, and without `compress`.
    """

    asynchronous = True

    def __init__(
        self,
        local: LocalCommunicator,
        ranks: Communicator,
        compress: str = "none",
        inter_node: bool = True,
        shared: SharedSums | None = None,
    ) -> None:
        super().__init__(ranks.rank * local.size + local.rank, ranks.size * local.size)
        self._local = local
        self._ranks = ranks
        self._shared = shared
        self._inter_node = inter_node
        self._is_local_leader = local.rank == 0
        self._compressor = host_compressor(compress, self.size)
        self.compresses = self._compressor is not None
        self.overlaps = inter_node

    def allocate_gradients(self, count: int) -> Array | None:
        """Shared memory for the local leader, None for the other threads."""
        memory = self._shared.allocate(count) if self._shared is not None and self._is_local_leader else None
        allocated = self._local.sum([float(memory is not None)])[0] > 0
        # The threads of a process wait for each other at every bucket: only a single thread does not block.
        self.overlaps = self._inter_node or (allocated and self._local.size == 1)
        return memory

    def start(self, collective: Collective) -> Work:
        if collective.op is Op.ALL_REDUCE:
            return self._start_all_reduce(collective)
        if collective.op is Op.BROADCAST:
            assert collective.peer is not None
            self._broadcast(collective.array, collective.peer)
        else:
            assert collective.op is Op.BARRIER, f"{collective.op.value} among threads of several processes"
            self._barrier()
        return FinishedWork()

    def _start_all_reduce(self, collective: Collective) -> Work:
        """What makes progress while the threads compute is the ranks' part."""
        array, average = collective.array, collective.operator is Operator.AVG
        compressor = None if collective.overlap is None else self._compressor
        work = HierarchicalWork(self._local, array, collective.overlap or nullcontext())
        self._local.reduce(array)
        if not self._is_local_leader:
            return work
        if self._shared is not None and self._shared.holds(array):
            work.lead(self._shared.start(array, 1 / self.size if average else 1.0))
        elif compressor is not None:
            sent = compressor.compress(array)
            summed = self._ranks.start(Collective(Op.ALL_REDUCE, sent, sent, Operator.SUM, compact=True))
            work.lead(summed, compressor=compressor, compressed=sent)
        else:
            blocking = collective.blocking or not self._inter_node
            summed = self._ranks.start(Collective(Op.ALL_REDUCE, array, array, Operator.SUM, blocking=blocking))
            work.lead(summed, divisor=self.size if average else 1)
            if blocking:
                work.poll()
        return work

    def _broadcast(self, array: Array, root: int) -> None:
        process, thread = divmod(root, self._local.size)
        if process == self._ranks.rank and thread != 0:
            self._local.broadcast(array, thread)
        if self._is_local_leader:
            self._ranks.broadcast(array, process)
        self._local.broadcast(array)

    def _barrier(self) -> None:
        self._local.barrier()
        if self._is_local_leader:
            self._ranks.barrier()
        self._local.barrier()

    def sum(self, values: Array) -> Array:
        total = self._local.sum(values)
        if self._is_local_leader:
            total = self._ranks.sum(total)
        self._local.broadcast(total)
        return total

    def abort(self) -> None:
        self._local.abort()
        self._ranks.abort()

    def close(self) -> None:
        self._local.close()
        if self._is_local_leader:
            self._ranks.close()


class HierarchicalWork(Work):
    """An all-reduce whose threads have added up their part.

    Args:
        local: connects the threads of this process.
        array: this thread's array.
        timed: entered now, left when the ranks' part has ended.
    """

    def __init__(self, local: LocalCommunicator, array: Array, timed: AbstractContextManager[None]) -> None:
        self._local = local
        self._array = array
        self._work: Work = FinishedWork()
        self._divisor = 1
        self._compressor: Fp16Compressor | None = None
        self._compressed: Array | None = None
        self._is_local_leader = self._ranks_done = False
        self._timed = ExitStack()
        self._timed.enter_context(timed)

    def lead(
        self, work: Work, divisor: int = 1, compressor: Fp16Compressor | None = None, compressed: Array | None = None
    ) -> None:
        """Take over the ranks' part; called by the local leader.

        Args:
            work: the ranks' all-reduce.
            divisor: what its result has to be divided by.
            compressor: decompresses its result; None: it is in the array itself.
            compressed: its array, if there is a compressor.
        """
        self._work, self._divisor = work, divisor
        self._compressor, self._compressed = compressor, compressed
        self._is_local_leader = True

    def wait(self, seconds: float) -> bool:
        if self._is_local_leader and not self._poll_ranks(seconds):
            return False
        if self._compressor is not None:
            self._compressor.decompress(self._compressed, self._array)
        elif self._divisor != 1:
            self._array /= self._divisor
        self._local.broadcast(self._array)
        self._timed.close()
        return True

    def poll(self) -> None:
        if self._is_local_leader:
            self._poll_ranks(0.0)

    def _poll_ranks(self, seconds: float) -> bool:
        if not self._ranks_done:
            self._ranks_done = self._work.wait(seconds)
            if self._ranks_done:
                self._timed.close()
        return self._ranks_done
