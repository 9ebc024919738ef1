"""Every operation in terms of MPI's non-blocking calls, which can be given up; the base of `mpi.MpiCommunicator`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from caffepy.errors import PeerError, UserError
from caffepy.parallel.operations import Operation, Operator, Work

T = TypeVar("T")

_SPINS = 100
"""Looks at a request before the processor is left to others."""
_SLEEPS = (0.0001, 0.002)
"""Shortest and longest pause between looks after that."""


class Calls(Protocol):
    """Carries calls to a thread that may call MPI; `mpi.CallService`."""

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

    def start(self, operation: Operation) -> Work:
        """`GroupCommunicator.start`."""
        buffers = _Buffers(operation, int(self._comm.size))
        try:
            request = self._calls.call(lambda: self._request(operation, buffers.sent, buffers.received))
        except self._mpi.Exception as error:
            raise PeerError(f"MPI's {operation.name} failed: {error}") from error
        return MpiWork(self._mpi, self._calls, request, buffers)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """`GroupCommunicator.empty`."""
        return np.empty(shape, dtype)

    def _request(self, operation: Operation, sent: Any, received: Any) -> Any:
        comm, peer = self._comm, operation.peer
        sent_or_place = self._mpi.IN_PLACE if sent is received else sent
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


class _Buffers:
    """An operation's arrays as MPI takes them: float16 is reduced in float32, and what is only moved is bytes.

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
        return array.astype(np.float32) if array.dtype == np.float16 else array

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
    """

    def __init__(self, mpi: Any, calls: Calls, request: Any, buffers: _Buffers) -> None:
        self._mpi = mpi
        self._calls = calls
        self._request = request
        self._operation = buffers.operation
        self._buffers = buffers
        self._status = mpi.Status()

    @property
    def waits_for(self) -> list[int]:
        peer = self._operation.peer
        return [peer] if self._operation.kind is None and peer is not None else []

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        looks = 0
        while not self._test():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            looks += 1
            if looks > _SPINS:
                time.sleep(min(left, _SLEEPS[1], _SLEEPS[0] * (looks - _SPINS)))
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
        if self._operation.name == "receive":
            count, room = self._status.Get_count(self._mpi.BYTE), self._buffers.received.nbytes
            if count != room:
                raise UserError(f"rank {self._operation.peer} sent {count} bytes, this rank expects {room}")
        self._buffers.finish()
