"""Every operation in terms of NCCL's calls on the current stream; used by `nccl.NcclCommunicator`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from caffepy.backend.types import Array
from caffepy.errors import MissingExtraError
from caffepy.parallel.communicators.collectives import Operation, Operator, piece_of, rows

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as error:
    raise MissingExtraError("CuPy", "cuda13", "to train on GPUs") from error

_TYPES = {
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint8": "NCCL_UINT8",
    "uint16": "NCCL_BFLOAT16",
}
_OPERATORS = {
    Operator.SUM: "NCCL_SUM",
    Operator.PRODUCT: "NCCL_PROD",
    Operator.MIN: "NCCL_MIN",
    Operator.MAX: "NCCL_MAX",
    Operator.AVG: "NCCL_AVG",
}
_SLEEPS = (0.00005, 0.002)
"""Shortest and longest pause between looks at an event."""


def nccl_type(array: Array) -> int:
    """NCCL's number for an array's dtype; uint16 is bfloat16, 9, for which CuPy did not always have a name."""
    return int(getattr(nccl, _TYPES[str(array.dtype)], 9))


def nccl_operator(operator: Operator) -> int:
    """NCCL's number for an operator; CuPy had no name for ncclAvg, 4, before version 14."""
    return int(getattr(nccl, _OPERATORS[operator], 4))


def enqueue(comm: Any, operation: Operation, rank: int, size: int) -> Any:
    """Put a collective on the current stream and return an event that comes when it is done.

    What follows on the stream sees the result without any wait of the host.

    Args:
        comm: CuPy's communicator.
        operation: the operation; arrays on the current GPU.
        rank: this device.
        size: the number of devices.
    """
    stream = cupy.cuda.get_current_stream().ptr
    if operation.name == "barrier":
        token = cupy.zeros(1, cupy.float32)
        operation = Operation("all_reduce", token, token, Operator.SUM)
    if operation.name in ("gather", "scatter", "all_to_all"):
        _exchange(comm, operation, rank, size, stream)
    else:
        _call(comm, operation, stream)
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


def _call(comm: Any, operation: Operation, stream: int) -> None:
    """What NCCL has a call for."""
    sent, received, peer = operation.sent, operation.received, operation.peer
    one: Array = sent if sent is not None else received
    other: Array = one if received is None else received
    kind = nccl_type(one)
    operator = None if operation.operator is None else nccl_operator(operation.operator)
    # NCCL does not look at the pointer of a side that has nothing to send or receive.
    source, target = one.data.ptr, other.data.ptr
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: comm.allReduce(source, target, one.size, kind, operator, stream),
        "reduce": lambda: comm.reduce(source, target, one.size, kind, operator, peer, stream),
        "reduce_scatter": lambda: comm.reduceScatter(source, target, other.size, kind, operator, stream),
        "broadcast": lambda: comm.broadcast(source, target, one.size, kind, peer, stream),
        "all_gather": lambda: comm.allGather(source, target, one.size, kind, stream),
    }
    calls[operation.name]()


def _exchange(comm: Any, operation: Operation, rank: int, size: int, stream: int) -> None:
    """What NCCL has no call for: pieces from rank to rank, in one group, so that none waits for another."""
    what = operation.kind
    assert what is not None
    senders, receivers = what.senders(size, operation.peer), what.receivers(size, operation.peer)
    with _together():
        if rank in senders:
            for receiver in receivers:
                piece = piece_of(operation, receiver, size)
                comm.send(piece.data.ptr, piece.size, nccl_type(piece), receiver, stream)
        if rank in receivers:
            assert operation.received is not None
            for sender, piece in zip(senders, rows(operation.received, len(senders)), strict=True):
                comm.recv(piece.data.ptr, piece.size, nccl_type(piece), sender, stream)


@contextmanager
def _together() -> Iterator[None]:
    """Calls of NCCL of which none waits for another."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


class Message:
    """A send or receive, and the stream that was current when it was started.

    Args:
        operation: the operation.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._stream = cupy.cuda.get_current_stream()
        self._event: Any = None

    def put(self, comm: Any) -> None:
        """Put it on its stream."""
        operation = self.operation
        if operation.name == "send":
            array, call = operation.sent, comm.send
        else:
            array, call = operation.received, comm.recv
        assert array is not None
        call(array.data.ptr, array.size, nccl_type(array), operation.peer, self._stream.ptr)

    def mark(self) -> None:
        """It is on its stream."""
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(self._stream)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._event is not None and bool(self._event.done)


class Messages:
    """Sends and receives that are put on their streams together, as late as somebody waits for one.

    On a stream they would wait for each other in the order of the calls: two ranks that both start to receive and then
    send would never come to the sending.
    """

    def __init__(self) -> None:
        self._pending: list[Message] = []

    def add(self, operation: Operation) -> Message:
        """Keep an operation for the next `flush`."""
        self._pending.append(Message(operation))
        return self._pending[-1]

    def flush(self, comm: Any) -> None:
        """Put all that are kept on their streams."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        with _together():
            for message in pending:
                message.put(comm)
        for message in pending:
            message.mark()


class NcclWork:
    """An operation on a stream.

    Args:
        done: whether it has ended; raises what the connection or an abort has to say.
        operation: what was called; its arrays must not be freed before.
    """

    def __init__(self, done: Callable[[], bool], operation: Operation) -> None:
        self._done = done
        self._operation = operation

    @property
    def waits_for(self) -> list[int]:
        peer = self._operation.peer
        return [peer] if self._operation.kind is None and peer is not None else []

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause = _SLEEPS[0]
        while not self._done():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _SLEEPS[1])
        return True
