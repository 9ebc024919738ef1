"""The communicator of all threads of all ranks, and sums in memory that all ranks of a machine share.

The threads of a process reduce among themselves, then thread 0 speaks for all of them.

`SharedSums` adds arrays of the ranks of one machine: each rank adds up its share of the elements. It owns the shared
memory, and the order in which ranks read and write it. Ranks wait for each other in barriers, which also make one
rank's writes visible to the others. No rank waits before the end, so that ranks need not keep pace.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.backend.types import Array
from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    FinishedWork,
    Op,
    PendingCollective,
    PolledWork,
    ReduceOp,
    WorkSequence,
    host_compressor,
)
from caffepy.distributed.communicators.local import LocalCommunicator

# -- sums in shared memory -----------------------------------------------------------------------------

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
"""Where files are memory, on Linux."""
_LONGEST_NAME = 256
_CHUNK = 2**15
"""Numbers that are added up at a time: few enough for a core's cache, enough for NumPy."""


class SharedSums:
    """Sums over the ranks of one machine.

    Args:
        ranks: connects them.
        arrived: the same, for nothing but telling that a rank's numbers are complete.
        added: the same, for nothing but telling that a rank has added up its share.
    """

    def __init__(self, ranks: Communicator, arrived: Communicator, added: Communicator) -> None:
        self._ranks = ranks
        self._rank, self._size = ranks.rank, ranks.size
        self._arrived, self._added = arrived, added
        self._parts: list[Any] = []
        self._total: Any = None
        self._started = 0
        self._added_up = 0

    def allocate(self, count: int) -> Any | None:
        """Memory for this rank's numbers; called by all ranks.

        Args:
            count: how many float32 numbers, the same for all.

        Returns:
            Zeros, (count,); None if the machine has no such memory, or not enough of it.
        """
        # Each rank's part begins on a page: its pages lie near the core that reserves them, and no page has two writers
        # while gradients are made.
        stride = -(-4 * count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with ExitStack() as opened:
            file = self._open_common(opened)
            size = (self._size + 1) * stride
            if file is None or not self._all(self._reserve(file, stride, count)):
                if self._rank == 0:
                    text = "%s has no %.0f MiB for gradients that all ranks see: they are sent"
                    logger.info(text, _FOLDER, size / 2**20)
                return None
            memory = np.frombuffer(mmap.mmap(file, size), np.float32)
        *self._parts, self._total = (memory[at * stride // 4 :][:count] for at in range(self._size + 1))
        return self._parts[self._rank]

    def holds(self, array: Any) -> bool:
        """Whether an array is part of what `allocate` gave."""
        return bool(self._parts) and np.may_share_memory(array, self._parts[self._rank])

    def start(self, array: Any, factor: float) -> PendingCollective:
        """Start array = factor times the sum of all ranks' arrays; all ranks start theirs in the same order.

        This rank's share is added up in `wait` and `poll`, so call them now and then.
        """
        start = (array.ctypes.data - self._parts[self._rank].ctypes.data) // 4
        self._started += 1
        return WorkSequence(self._sum(self._started, range(start, start + array.size), factor))

    def _sum(self, number: int, elements: range, factor: float) -> Iterator[PendingCollective]:
        """Numbers arrive, shares are added up, the others' shares are taken."""
        yield self._arrived.start(Collective(Op.BARRIER))
        yield PolledWork(lambda: number == self._added_up + 1)  # barriers have no names, only an order
        self._add(elements, factor)
        self._added_up += 1
        # Behind it all shares of the total are written, and the barrier makes them visible.
        yield self._added.start(Collective(Op.BARRIER))
        for rank in range(self._size):
            if rank != self._rank:
                share = slice(*self._share(elements, rank))
                self._parts[self._rank][share] = self._total[share]

    def _add(self, elements: range, factor: float) -> None:
        """Add up this rank's share."""
        own, total = self._parts[self._rank], self._total
        first, last = self._share(elements, self._rank)
        for start in range(first, last, _CHUNK):
            chunk = slice(start, min(start + _CHUNK, last))
            # In rank order for every element: the bits depend neither on the rank that adds up nor on its speed.
            np.add(self._parts[0][chunk], self._parts[1][chunk], out=total[chunk])
            for part in self._parts[2:]:
                total[chunk] += part[chunk]
            total[chunk] *= np.float32(factor)
            own[chunk] = total[chunk]

    def _share(self, elements: range, rank: int) -> tuple[int, int]:
        first, last = (elements.start + len(elements) * r // self._size for r in (rank, rank + 1))
        return first, last

    def _open_common(self, opened: ExitStack) -> int | None:
        """An empty file without a name that all ranks have open; None if one of them could not open it."""
        name = np.zeros(_LONGEST_NAME, np.uint8)
        if self._rank == 0:
            with suppress(OSError):  # then the name stays empty
                made, path = tempfile.mkstemp(prefix="caffepy-", dir=_FOLDER)
                opened.callback(os.close, made)
                # Removed when all have it open: the memory then goes with the last process, also one that is killed.
                opened.callback(os.unlink, path)
                name[: len(os.fsencode(path))] = np.frombuffer(os.fsencode(path), np.uint8)
        # An empty name tells all ranks that rank 0 has no such memory: every rank comes here, and none waits for
        # another.
        self._ranks.broadcast(name)
        file = _opened(bytes(name).rstrip(b"\0"))
        if file is not None:
            opened.callback(os.close, file)
        # All or none: a rank in a container of its own does not see the file.
        return file if self._all(file is not None) else None

    def _reserve(self, file: int, stride: int, count: int) -> bool:
        """Take the pages that this rank writes, near its core; False if there are not enough."""
        # Without that a machine that has run out of them would kill the process when it writes.
        first, last = self._share(range(count), self._rank)
        try:
            os.posix_fallocate(file, self._rank * stride, stride)
            os.posix_fallocate(file, self._size * stride + 4 * first, max(4 * (last - first), 1))
            if self._rank == self._size - 1:
                os.posix_fallocate(file, (self._size + 1) * stride - 1, 1)
        except OSError:
            return False
        return True

    def _all(self, done: bool) -> bool:
        return bool(self._ranks.sum([float(done)])[0] == self._size)


def _opened(name: bytes) -> int | None:
    """The file of a name, open for reading and writing; None if there is none here."""
    try:
        return os.open(name, os.O_RDWR) if name else None
    except OSError:
        return None


# -- the communicator ----------------------------------------------------------------------------------


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
                # The measured exchange ends here; what follows is the wait for this process's own threads.
                timed.close()
            # The broadcast waits for the other threads: it must not happen in `poll`, while this thread could compute.
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
        # First all threads of this process, so that the leader speaks for all; the second barrier tells them that the
        # ranks have met.
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
