"""Threads times ranks: the threads of a process reduce among themselves, then thread 0 speaks for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

from caffepy.backend.types import Array
from caffepy.distributed.communicators.collectives import (
    Collective,
    FinishedWork,
    Op,
    PendingCollective,
    ReduceOp,
    WorkSequence,
)
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.compression import host_compressor
from caffepy.distributed.communicators.local import LocalCommunicator
from caffepy.distributed.communicators.shared_memory import SharedSums


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

    def start(self, collective: Collective) -> PendingCollective:
        if collective.op is Op.ALL_REDUCE:
            return WorkSequence(self._all_reduce(collective))
        if collective.op is Op.BROADCAST:
            assert collective.peer is not None
            self._broadcast(collective.array, collective.peer)
        else:
            assert collective.op is Op.BARRIER, f"{collective.op.value} among threads of several processes"
            self._barrier()
        return FinishedWork()

    def _all_reduce(self, collective: Collective) -> Iterator[PendingCollective | None]:
        """The threads of each process, the ranks (which makes progress while threads compute), the threads again."""
        with ExitStack() as timed:
            timed.enter_context(collective.overlap or nullcontext())
            self._local.reduce(collective.array)
            if self._is_local_leader:
                yield from self._reduce_ranks(collective)
                timed.close()
            yield None
            self._local.broadcast(collective.array)

    def _reduce_ranks(self, collective: Collective) -> Iterator[PendingCollective]:
        array, divisor = collective.array, self.size if collective.operator is ReduceOp.AVG else 1
        if self._shared is not None and self._shared.holds(array):
            yield self._shared.start(array, 1 / divisor)
        elif self._compressor is not None and collective.overlap is not None:
            sent = self._compressor.compress(array)
            yield self._ranks.start(Collective(Op.ALL_REDUCE, sent, sent, ReduceOp.SUM, compact=True))
            self._compressor.decompress(sent, array)
        else:
            blocking = collective.blocking or not self._inter_node
            work = self._ranks.start(Collective(Op.ALL_REDUCE, array, array, ReduceOp.SUM, blocking=blocking))
            if blocking:
                work.synchronize()
            else:
                yield work
            if divisor != 1:
                array /= divisor

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
