"""Every operation in terms of MPI's non-blocking calls, which can be given up; the base of `mpi.MpiCommunicator`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from caffepy.errors import PeerError, UserError
from caffepy.parallel.communicators.collectives import Operation, Operator, Work
from caffepy.parallel.communicators.compression import add_bfloat16

T = TypeVar("T")

_EAGER_SECONDS = 0.02
"""For how long a wait looks again as soon as others have had the processor: MPI moves data only when called."""
_PAUSES = (0.00005, 0.002)
"""Shortest and longest pause between looks after that."""


class Calls(Protocol):
    """Carries calls to a thread that may call MPI; `mpi.MainThreadDispatcher`."""

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`.

        Raises:
            AbortedError: `abort` was called first.
        """

    def abort(self) -> None:
        """Refuse further calls and let go those who wait."""


class MpiOperations:
    """Carries out operations of host arrays.

    Args:
        mpi: mpi4py's module.
        comm: an MPI communicator of its own.
        calls: carries the calls to a thread that may make them.
    """

    memory = "host"

    def __init__(self, mpi: Any, comm: Any, calls: Calls) -> None:
        self._mpi = mpi
        self._comm = comm
        self._calls = calls
        # MPI goes on writing to the arrays of an operation that nobody waits for any more: they must not be freed.
        self._unfinished: set[MpiWork] = set()
        self._sums: dict[Callable[..., None], Any] = {}

    def start(self, operation: Operation) -> Work:
        """`GroupCommunicator.start`."""
        buffers = _Buffers(operation, int(self._comm.size))
        try:
            request = self._calls.call(lambda: self._request(operation, buffers.sent, buffers.received))
        except self._mpi.Exception as error:
            raise PeerError(f"MPI's {operation.name} failed: {error}") from error
        work = MpiWork(self._mpi, self._calls, request, buffers, self._unfinished.discard)
        self._unfinished.add(work)
        return work

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """`GroupCommunicator.empty`."""
        return np.empty(shape, dtype)

    def _request(self, operation: Operation, sent: Any, received: Any) -> Any:
        comm, peer = self._comm, operation.peer
        sent_or_place = self._mpi.IN_PLACE if sent is received else sent
        if operation.compact:
            add = _add_bfloats if operation.bfloat16 else _add_halves
            return comm.Iallreduce(sent_or_place, [received, self._mpi.UINT16_T], self._sum(add))
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: comm.Iallreduce(sent_or_place, received, self._operator(operation)),
            "reduce": lambda: comm.Ireduce(sent_or_place, received, self._operator(operation), peer),
            "reduce_scatter": lambda: comm.Ireduce_scatter_block(sent, received, self._operator(operation)),
            "broadcast": lambda: comm.Ibcast(received if sent is None else sent, peer),
            "scatter": lambda: comm.Iscatter(sent, received, peer),
            "all_gather": lambda: comm.Iallgather(sent, received),
            "gather": lambda: comm.Igather(sent, received, peer),
            "all_to_all": lambda: comm.Ialltoall(sent, received),
            "barrier": comm.Ibarrier,
            "send": lambda: comm.Isend(sent, peer, operation.tag),
            "receive": lambda: comm.Irecv(received, peer, operation.tag),
        }
        return calls[operation.name]()

    def _sum(self, add: Callable[..., None]) -> Any:
        """MPI's operator that adds numbers of two bytes; MPI has no types for them."""
        if add not in self._sums:
            self._sums[add] = self._mpi.Op.Create(add, commute=True)
        return self._sums[add]

    def _operator(self, operation: Operation) -> Any:
        mpi = self._mpi
        assert operation.operator is not None
        return {
            Operator.SUM: mpi.SUM,
            Operator.AVG: mpi.SUM,
            Operator.PRODUCT: mpi.PROD,
            Operator.MIN: mpi.MIN,
            Operator.MAX: mpi.MAX,
        }[operation.operator]


def _add_halves(source: Any, target: Any, datatype: Any) -> None:
    """target += source, as MPI calls it: two buffers of float16 numbers."""
    total = np.frombuffer(target, np.float16)
    with np.errstate(all="ignore"):
        np.add(total, np.frombuffer(source, np.float16), out=total)


def _add_bfloats(source: Any, target: Any, datatype: Any) -> None:
    """The same of bfloat16 numbers."""
    add_bfloat16(np.frombuffer(source, np.uint16), np.frombuffer(target, np.uint16))


class _Buffers:
    """An operation's arrays as MPI takes them: moved as bytes, and float16 reduced in float32 unless it is compact.

    Args:
        operation: the operation.
        size: the number of ranks.
    """

    def __init__(self, operation: Operation, size: int) -> None:
        self.operation = operation
        self._size = size
        self.sent = self._convert(operation.sent)
        same = operation.received is operation.sent
        self.received = self.sent if same else self._convert(operation.received)

    def _convert(self, array: Any) -> Any:
        if array is None:
            return None
        if self.operation.operator is None:
            return array.reshape(-1).view(np.uint8)
        widened = array.dtype == np.float16 and not self.operation.compact
        return array.astype(np.float32) if widened else array

    def finish(self) -> None:
        """Bring the result to where it was asked for."""
        if self.received is None or self.operation.operator is None:
            return
        if self.operation.operator is Operator.AVG:
            self.received /= self._size
        if self.received is not self.operation.received:
            assert self.operation.received is not None
            self.operation.received[...] = self.received


class MpiWork:
    """A request of MPI.

    Args:
        mpi: mpi4py's module.
        calls: carries the calls to a thread that may make them.
        request: MPI's request.
        buffers: the operation's arrays.
        on_end: called with this work when it has ended.
    """

    def __init__(
        self, mpi: Any, calls: Calls, request: Any, buffers: _Buffers, on_end: Callable[[MpiWork], None]
    ) -> None:
        self._mpi = mpi
        self._calls = calls
        self._request = request
        self._operation = buffers.operation
        self._buffers = buffers
        self._on_end = on_end
        self._status = mpi.Status()

    @property
    def waits_for(self) -> list[int]:
        peer = self._operation.peer
        return [peer] if self._operation.kind is None and peer is not None else []

    def wait(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._test():
            waited = time.monotonic() - begin
            if waited >= seconds:
                return False
            pause = 0.0 if waited < _EAGER_SECONDS else min(_PAUSES[1], max(_PAUSES[0], waited / 1000))
            time.sleep(min(seconds - waited, pause))
        self._finish()
        return True

    def _test(self) -> bool:
        try:
            return bool(self._calls.call(lambda: self._request.Test(self._status)))
        except self._mpi.Exception as error:
            if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
                raise UserError("another rank gave more numbers than this rank has room for") from error
            raise PeerError(f"MPI's {self._operation.name} failed: {error}") from error

    def _finish(self) -> None:
        self._on_end(self)
        if self._operation.name == "receive":
            count, room = self._status.Get_count(self._mpi.BYTE), self._buffers.received.nbytes
            if count != room:
                raise UserError(f"rank {self._operation.peer} sent {count} bytes, this rank expects {room}")
        self._buffers.finish()
