"""MPI's communicator of host arrays, one device a process. Alone in importing mpi4py.

MPI may allow its calls to one thread alone (MPI_THREAD_FUNNELED, SERIALIZED): `MainThreadDispatcher` carries those of
solver threads to it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    FinishedWork,
    Op,
    PendingCollective,
    PolledWork,
    ReduceOp,
    WorkSequence,
    add_bfloat16,
)
from caffepy.errors import AbortedError, PeerError, UserError
from caffepy.utils.installation import MissingExtraError

T = TypeVar("T")

_POLL = 0.002
"""How long the main thread waits for a call, in seconds."""


class MainThreadDispatcher:
    """Runs MPI calls of solver threads: in the caller, or on the main thread where MPI allows no other.

    Args:
        direct: MPI provides MPI_THREAD_MULTIPLE.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._main = threading.get_ident()
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._aborted = threading.Event()

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`.

        Raises:
            AbortedError: `abort` was called first.
        """
        if self._aborted.is_set():
            raise AbortedError("training was stopped")
        if self.direct or threading.get_ident() == self._main:
            return function()
        future: Future[T] = Future()
        self._calls.put((function, future))
        # Looked at again and again, because the main thread may have ended without serving the queue.
        while not wait([future], timeout=0.5).done:
            if self._aborted.is_set():
                raise AbortedError("training was stopped")
        return future.result()

    def serve(self) -> None:
        """Run queued calls until the queue stays empty for a moment; called by the main thread."""
        while True:
            try:
                function, future = self._calls.get(timeout=_POLL)
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def abort(self) -> None:
        """Wake all callers with AbortedError, now and later."""
        self._aborted.set()


_EAGER_SECONDS = 0.02
"""How long a wait polls without pauses: MPI moves data only when called. After that it would burn the core."""
_BLOCKING = (Op.ALL_REDUCE, Op.BROADCAST, Op.ALL_GATHER)
"""Collectives for which MPI's blocking call is used: with Open MPI on two cores a non-blocking sum of 233 MiB took
350 ms, a blocking one 134. A barrier may last long (a snapshot, a test): it is polled, which leaves the core free."""


def load_mpi() -> Any:
    """mpi4py's MPI module, initialised.

    Raises:
        MissingExtraError: mpi4py or the MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise MissingExtraError("mpi4py", "mpi", "to train on several ranks") from None
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(f"an MPI library for mpi4py ({error})", "mpi", "to train on several ranks") from error
    return MPI


def find_started_mpi() -> Any | None:
    """mpi4py's MPI module if MPI has started and not ended; an interrupt may have ended its import at any moment."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI if MPI.Is_initialized() and not MPI.Is_finalized() else None


class MpiCommunicator(Communicator):
    """Host arrays among the processes of an MPI communicator.

    Args:
        mpi: mpi4py's module.
        comm: an MPI communicator of its own.
        dispatcher: carries calls to a thread that may call MPI.
    """

    def __init__(self, mpi: Any, comm: Any, dispatcher: MainThreadDispatcher) -> None:
        super().__init__(int(comm.rank), int(comm.size))
        self._mpi = mpi
        self._comm = comm
        self._dispatcher = dispatcher
        # MPI goes on writing to the arrays of a collective without a waiter: they must not be freed.
        self._unfinished: dict[int, tuple[Any, _Buffers]] = {}
        self._sums: dict[Callable[..., None], Any] = {}

    def start(self, collective: Collective) -> PendingCollective:
        if not collective.blocking or collective.op not in _BLOCKING:
            return WorkSequence(self._exchange(collective))
        with self._translated(collective):
            self._dispatcher.call(lambda: self._run_blocking(collective))
        if collective.operator is ReduceOp.AVG:
            np.divide(collective.array, self.size, out=collective.array)
        return FinishedWork()

    def _exchange(self, collective: Collective) -> Iterator[PendingCollective]:
        buffers, status = _Buffers(collective, self.size), self._mpi.Status()
        with self._translated(collective):
            # Every call of MPI goes to the thread that may call it, tests of requests too.
            request = self._dispatcher.call(lambda: self._request(collective, buffers.sent, buffers.received))

        def is_done() -> bool:
            with self._translated(collective):
                return bool(self._dispatcher.call(lambda: request.Test(status)))

        self._unfinished[id(buffers)] = request, buffers
        yield PolledWork(is_done, collective, _EAGER_SECONDS)
        del self._unfinished[id(buffers)]
        if collective.op is Op.RECEIVE:
            # A shorter message is no error to MPI; the rest of the array would keep its old numbers.
            count, expected = status.Get_count(self._mpi.BYTE), buffers.received.nbytes
            if count != expected:
                raise UserError(f"rank {collective.peer} sent {count} bytes, this rank expects {expected}")
        buffers.finish()

    @contextmanager
    def _translated(self, collective: Collective) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                raise UserError("another rank sent more numbers than this rank's array holds") from error
            raise PeerError(f"MPI's {collective.op.value} failed: {error}") from error

    def abort(self) -> None:
        self._dispatcher.abort()

    def close(self) -> None:
        """Nothing: MPI_Finalize frees the communicator; to free it here would take all ranks at once."""

    def _run_blocking(self, collective: Collective) -> None:
        comm, array = self._comm, collective.array
        if collective.op is Op.ALL_REDUCE:
            comm.Allreduce(self._mpi.IN_PLACE, array, self._operator(collective))
        elif collective.op is Op.BROADCAST:
            comm.Bcast(array, collective.peer)
        else:
            comm.Allgather(collective.sent, collective.received)

    def _request(self, collective: Collective, sent: Any, received: Any) -> Any:
        comm, peer = self._comm, collective.peer
        sent_or_in_place = self._mpi.IN_PLACE if sent is received else sent
        if collective.compact:
            add = _add_bfloat16 if collective.is_bfloat16 else _add_float16
            return comm.Iallreduce(sent_or_in_place, [received, self._mpi.UINT16_T], self._sum(add))
        calls: dict[Op, Callable[[], Any]] = {
            Op.ALL_REDUCE: lambda: comm.Iallreduce(sent_or_in_place, received, self._operator(collective)),
            Op.REDUCE: lambda: comm.Ireduce(sent_or_in_place, received, self._operator(collective), peer),
            Op.REDUCE_SCATTER: lambda: comm.Ireduce_scatter_block(sent, received, self._operator(collective)),
            Op.BROADCAST: lambda: comm.Ibcast(received if sent is None else sent, peer),
            Op.SCATTER: lambda: comm.Iscatter(sent, received, peer),
            Op.ALL_GATHER: lambda: comm.Iallgather(sent, received),
            Op.GATHER: lambda: comm.Igather(sent, received, peer),
            Op.ALL_TO_ALL: lambda: comm.Ialltoall(sent, received),
            Op.BARRIER: comm.Ibarrier,
            Op.SEND: lambda: comm.Isend(sent, peer, collective.tag),
            Op.RECEIVE: lambda: comm.Irecv(received, peer, collective.tag),
        }
        return calls[collective.op]()

    def _sum(self, add: Callable[..., None]) -> Any:
        """MPI's operator that adds numbers of two bytes; MPI has no types for them."""
        if add not in self._sums:
            # MPI calls the operator whenever it adds, long after this call: it is kept as long as the communicator.
            self._sums[add] = self._mpi.Op.Create(add, commute=True)
        return self._sums[add]

    def _operator(self, collective: Collective) -> Any:
        mpi = self._mpi
        assert collective.operator is not None
        return {
            ReduceOp.SUM: mpi.SUM,
            ReduceOp.AVG: mpi.SUM,
            ReduceOp.PRODUCT: mpi.PROD,
            ReduceOp.MIN: mpi.MIN,
            ReduceOp.MAX: mpi.MAX,
        }[collective.operator]


def _add_float16(source: Any, target: Any, datatype: Any) -> None:
    """target += source, as MPI calls it: two buffers of float16 numbers."""
    total = np.frombuffer(target, np.float16)
    with np.errstate(all="ignore"):
        np.add(total, np.frombuffer(source, np.float16), out=total)


def _add_bfloat16(source: Any, target: Any, datatype: Any) -> None:
    """target += source, as MPI calls it: two buffers of bfloat16 numbers."""
    add_bfloat16(np.frombuffer(source, np.uint16), np.frombuffer(target, np.uint16))


class _Buffers:
    """A collective's arrays as MPI takes them: bytes, or for a reduction numbers, float16 as float32 unless `compact`.

    Args:
        collective: whose arrays.
        size: the number of ranks.
    """

    def __init__(self, collective: Collective, size: int) -> None:
        self.collective = collective
        self._size = size
        self.sent = self._convert(collective.sent)
        same = collective.received is collective.sent
        self.received = self.sent if same else self._convert(collective.received)

    def _convert(self, array: Any) -> Any:
        if array is None:
            return None
        if self.collective.operator is None:
            return array.reshape(-1).view(np.uint8)
        # MPI has no type for float16. As float32 the sum is rounded once, as on other transports.
        widened = array.dtype == np.float16 and not self.collective.compact
        return array.astype(np.float32) if widened else array

    def finish(self) -> None:
        """Convert the result to the dtype of `collective.received`."""
        if self.received is None or self.collective.operator is None:
            return
        if self.collective.operator is ReduceOp.AVG:
            self.received /= self._size
        if self.received is not self.collective.received:
            assert self.collective.received is not None
            self.collective.received[...] = self.received
