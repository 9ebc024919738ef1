"""Every collective in terms of NCCL's calls on the current stream; used by `nccl.NcclCommunicator`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from caffepy.backend.types import Array
from caffepy.errors import MissingExtraError
from caffepy.parallel.communicators.collectives import Collective, Op, Operator, piece_of, rows

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as error:
    raise MissingExtraError("CuPy", "cuda13", "to train on GPUs") from error

_TYPES = {
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "uint16": 9,  # bfloat16
}
"""ncclDataType_t; CuPy does not have a name for each in every version."""
_OPERATORS = {Operator.SUM: 0, Operator.PRODUCT: 1, Operator.MAX: 2, Operator.MIN: 3, Operator.AVG: 4}
"""ncclRedOp_t."""


def nccl_type(array: Array) -> int:
    """The ncclDataType_t of an array's dtype; uint16 holds bfloat16."""
    return _TYPES[str(array.dtype)]


def enqueue(comm: Any, collective: Collective, rank: int, size: int) -> None:
    """Put a collective on the current stream; what follows on that stream sees the result.

    Args:
        comm: CuPy's communicator.
        collective: with arrays on the current GPU.
        rank: this device.
        size: the number of devices.
    """
    stream = cupy.cuda.get_current_stream().ptr
    if collective.op is Op.BARRIER:
        token = cupy.zeros(1, cupy.float32)
        collective = Collective(Op.ALL_REDUCE, token, token, Operator.SUM)
    if collective.op in (Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL):
        _exchange(comm, collective, rank, size, stream)
    else:
        _call(comm, collective, stream)


def record_event(stream: Any = None) -> Any:
    """A new event without timing, recorded on a stream; None: the current one."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def _call(comm: Any, collective: Collective, stream: int) -> None:
    """What NCCL has a call for."""
    sent, received, peer = collective.sent, collective.received, collective.peer
    one: Array = sent if sent is not None else received
    other: Array = one if received is None else received
    kind = nccl_type(one)
    operator = None if collective.operator is None else _OPERATORS[collective.operator]
    # NCCL does not look at the pointer of a side that has nothing to send or receive.
    source, target = one.data.ptr, other.data.ptr
    calls: dict[Op, Callable[[], None]] = {
        Op.ALL_REDUCE: lambda: comm.allReduce(source, target, one.size, kind, operator, stream),
        Op.REDUCE: lambda: comm.reduce(source, target, one.size, kind, operator, peer, stream),
        Op.REDUCE_SCATTER: lambda: comm.reduceScatter(source, target, other.size, kind, operator, stream),
        Op.BROADCAST: lambda: comm.broadcast(source, target, one.size, kind, peer, stream),
        Op.ALL_GATHER: lambda: comm.allGather(source, target, one.size, kind, stream),
    }
    calls[collective.op]()


def _exchange(comm: Any, collective: Collective, rank: int, size: int, stream: int) -> None:
    """What NCCL has no call for: pieces from rank to rank, in one group, so that none waits for another."""
    pattern = collective.pattern
    assert pattern is not None
    senders, receivers = pattern.senders(size, collective.peer), pattern.receivers(size, collective.peer)
    with _together():
        if rank in senders:
            for receiver in receivers:
                piece = piece_of(collective, receiver, size)
                comm.send(piece.data.ptr, piece.size, nccl_type(piece), receiver, stream)
        if rank in receivers:
            assert collective.received is not None
            for sender, piece in zip(senders, rows(collective.received, len(senders)), strict=True):
                comm.recv(piece.data.ptr, piece.size, nccl_type(piece), sender, stream)


@contextmanager
def _together() -> Iterator[None]:
    """Calls of NCCL of which none waits for another."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


@dataclass
class Message:
    """A send or receive, the stream that was current when it was started, and the event that it is done."""

    collective: Collective
    stream: Any
    event: Any = None

    @property
    def done(self) -> bool:
        """Whether the event has come."""
        return self.event is not None and bool(self.event.done)


class Messages:
    """Sends and receives that are put on their streams together, as late as somebody waits for one.

    On a stream they would wait for each other in the order of the calls: two ranks that both start to receive and then
    send would never come to the sending.
    """

    def __init__(self) -> None:
        self._pending: list[Message] = []

    def add(self, collective: Collective) -> Message:
        """Keep a message for the next `flush`."""
        self._pending.append(Message(collective, cupy.cuda.get_current_stream()))
        return self._pending[-1]

    def flush(self, comm: Any) -> None:
        """Put all that are kept on their streams."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        with _together():
            for message in pending:
                array = message.collective.array
                call = comm.send if message.collective.op is Op.SEND else comm.recv
                call(array.data.ptr, array.size, nccl_type(array), message.collective.peer, message.stream.ptr)
        for message in pending:
            message.event = record_event(message.stream)
