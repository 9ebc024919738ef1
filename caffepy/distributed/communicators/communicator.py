"""The contract of all communicators, the collectives and messages that they carry, and gradient compression.

Transports implement `start`, `abort` and `close`, and declare their capabilities. `local.py` connects the threads of
one process, `mpi.py` processes through host memory, `hierarchical.py` the threads of several processes,
`store_communicator.py` processes that share a store (over TCP), `nccl.py` GPUs. All ranks start the same collectives in
the same order.

A `Collective` is a collective or message as a value; `Communicator.start` takes it and returns a `PendingCollective`.
Its meaning is defined here in plain NumPy. Transports that only move bytes (`store_communicator.py`) compute with these
functions, and so do the tests of all others.

Gradients are compressed to float16 or bfloat16: half the bytes, ten or seven bits of mantissa. `Compressor` owns the
compressed copies, for transports that go over a wire. A bfloat16 array has the dtype uint16 and holds the upper halves
of float32 numbers, as everywhere in caffepy.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.types import Array
from caffepy.errors import PeerError

# -- compression ---------------------------------------------------------------------------------------

_CHUNK = 1 << 15
"""Numbers that are rounded at a time, so that what lies in between stays in the processor's cache."""


class Format(NamedTuple):
    """How numbers are kept in two bytes.

    Args:
        dtype: of a copy.
        round: called with a float32 array, a factor and the copy, which becomes their product.
        widen: called with the copy and a float32 array, which becomes the copy's numbers.
    """

    dtype: str
    round: Callable[[Array, float, Array], Any]
    widen: Callable[[Array, Array], Any]


class Compressor:
    """Copies of float32 arrays in two bytes a number, divided so that their sum is the mean.

    In float16 numbers above 65,504 in absolute value become infinite, those below 6e-8 zero; bfloat16 has float32's
    range with seven bits of mantissa. Both are rounded to the nearest, ties to even; NaN and infinity stay what they
    are.

    Args:
        form: of the copies.
        size: how many arrays the mean is of.
        empty: makes a copy of a shape and dtype.
        address: of an array's first element.
    """

    def __init__(self, form: Format, size: int, empty: Callable[..., Array], address: Callable[[Array], int]) -> None:
        self._format = form
        self._factor = 1.0 / size
        self._empty = empty
        self._address = address
        self._copies: dict[tuple[int, int], Array] = {}

    def compress(self, array: Array) -> Array:
        """array / size in two bytes: (P,). Each array keeps its copy, so that nothing is allocated a second time."""
        key = self._address(array), array.size
        if key not in self._copies:
            self._copies[key] = self._empty(array.shape, self._format.dtype)
        self._format.round(array, self._factor, self._copies[key])
        return self._copies[key]

    def decompress(self, copy: Array, array: Array) -> None:
        """array = the copy, once the copies of all ranks were added up."""
        self._format.widen(copy, array)


def host_compressor(kind: str, size: int) -> Compressor | None:
    """The compressor of host arrays; None where `kind`, one of `defaults.COMPRESSIONS`, is none.

    Args:
        kind: of compression.
        size: how many arrays a mean is of.
    """
    form = _FORMATS.get(kind)
    return None if form is None else Compressor(form, size, np.empty, lambda array: int(array.ctypes.data))


def _round_float16(array: np.ndarray, factor: float, copy: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # the update sees what became infinite, and skips it
        np.multiply(array, factor, out=copy, casting="unsafe")


def _round_bfloat16(array: np.ndarray, factor: float, copy: np.ndarray) -> None:
    for start in range(0, array.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        round_to_bfloat16(array[part] * np.float32(factor), copy[part])


def round_to_bfloat16(values: np.ndarray, target: np.ndarray) -> None:
    """target, uint16 (P,), = values, float32 (P,), rounded to the nearest bfloat16, to even in the middle."""
    for start in range(0, values.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        bits = values[part].view(np.uint32)
        upper = bits >> 16
        # Half of the last place less one, and the last kept bit: ties go to the even neighbour.
        rounded = (bits + ((upper & 1) + np.uint32(0x7FFF))) >> 16
        # The sum could carry a NaN's bits over into the sign; a NaN needs one bit below the exponent.
        target[part] = np.where(np.isnan(values[part]), upper | np.uint32(0x40), rounded)


def widen_bfloat16(copy: np.ndarray, target: np.ndarray) -> None:
    """target, float32 (P,), = the numbers of a bfloat16 array."""
    np.left_shift(copy, 16, out=target.view(np.uint32), dtype=np.uint32)


def add_bfloat16(source: np.ndarray, total: np.ndarray) -> None:
    """total += source, bfloat16 arrays (P,), rounded once."""
    for start in range(0, total.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        sums, others = (np.empty(total[part].size, np.float32) for _ in range(2))
        widen_bfloat16(total[part], sums)
        widen_bfloat16(source[part], others)
        with np.errstate(all="ignore"):
            sums += others
        round_to_bfloat16(sums, total[part])


_FORMATS = {
    "fp16": Format("float16", _round_float16, lambda copy, array: np.copyto(array, copy)),
    "bf16": Format("uint16", _round_bfloat16, widen_bfloat16),
}


# -- collectives and messages --------------------------------------------------------------------------

_POLL_SECONDS = 1.0
"""How long `synchronize` waits before it waits again: an abort ends each wait by an error."""
_PAUSES = (0.00005, 0.002)
"""Shortest and longest pause between polls, in seconds; the longer a wait, the longer its pauses."""


class Op(Enum):
    """The collectives, and point-to-point messages. The values are the names in messages."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    SEND = "send"
    RECEIVE = "receive"


class ReduceOp(Enum):
    """How arrays of several devices become one, element by element. AVG, the mean, is for floating-point numbers."""

    SUM = "SUM"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    AVG = "AVG"


_FUNCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.AVG: np.add,
}


@dataclass(frozen=True)
class Pattern:
    """Which ranks of a collective send and receive, and what a receiver does with the pieces.

    Args:
        reduces: the pieces by the operator; else they are received one after the other, in rank order.
        sliced: a sender's array has one piece for each receiver, in rank order; else all receive the whole array.
        from_root: only the root sends.
        to_root: only the root receives.
    """

    reduces: bool = False
    sliced: bool = False
    from_root: bool = False
    to_root: bool = False

    def senders(self, size: int, root: int | None) -> list[int]:
        """The ranks whose pieces a receiver gets."""
        return [root] if self.from_root and root is not None else list(range(size))

    def receivers(self, size: int, root: int | None) -> list[int]:
        """The ranks that get a piece of a sender."""
        return [root] if self.to_root and root is not None else list(range(size))


PATTERNS = {
    Op.ALL_REDUCE: Pattern(reduces=True),
    Op.REDUCE: Pattern(reduces=True, to_root=True),
    Op.REDUCE_SCATTER: Pattern(reduces=True, sliced=True),
    Op.BROADCAST: Pattern(from_root=True),
    Op.SCATTER: Pattern(sliced=True, from_root=True),
    Op.ALL_GATHER: Pattern(),
    Op.GATHER: Pattern(to_root=True),
    Op.ALL_TO_ALL: Pattern(sliced=True),
    Op.BARRIER: Pattern(),
}


@dataclass(frozen=True)
class Collective:
    """One rank's call of a collective or message. Arrays are contiguous and of one dtype.

    Args:
        op: which one.
        sent: this rank's contribution; None where it sends nothing.
        received: the output array, possibly `sent` itself; None where it receives nothing.
        operator: of a reduction.
        peer: the root, or the other end of a message.
        tag: of a message.
        compact: accumulate in the array's own two-byte dtype instead of float32: float16, or bfloat16 stored as uint16.
        blocking: the caller synchronizes at once, so that `start` may use the transport's blocking call.
        overlap: start an averaging all-reduce that makes progress while the device computes, compressed if the
            communicator `compresses`. The context manager is entered where the all-reduce begins and left where it
            ends, with its stream current.
    """

    op: Op
    sent: Array | None = None
    received: Array | None = None
    operator: ReduceOp | None = None
    peer: int | None = None
    tag: int = 0
    compact: bool = False
    blocking: bool = False
    overlap: AbstractContextManager[None] | None = None

    @property
    def is_bfloat16(self) -> bool:
        """Whether an array of uint16 holds bfloat16 numbers."""
        return self.compact and self.received is not None and self.received.dtype == np.uint16

    @property
    def pattern(self) -> Pattern | None:
        """None for a send or receive."""
        return PATTERNS.get(self.op)

    @property
    def array(self) -> Array:
        """The array of an in-place collective: of an all-reduce, or what a broadcast sends or receives."""
        array = self.received if self.sent is None else self.sent
        assert array is not None
        return array

    @property
    def message_peers(self) -> list[int]:
        """The other end of a send or receive; empty for a collective."""
        return [] if self.pattern is not None or self.peer is None else [self.peer]

    def describe(self, size: int) -> str:
        """What all ranks must agree on, as messages show it: ``all_reduce SUM of 4 float32``."""
        array = self.received if self.sent is None else self.sent
        if self.pattern is None:
            return f"message of {_extent(array)}"
        root = "" if self.peer is None else f" {'from' if self.pattern.from_root else 'to'} rank {self.peer}"
        operator = "" if self.operator is None else f" {self.operator.value}"
        parts = size if self.pattern.sliced and self.sent is not None else 1
        return f"{self.op.value}{operator}{root}" + ("" if array is None else f" of {_extent(array, parts)}")


class PendingCollective(ABC):
    """A collective or message that was started; its arrays must be left alone until it is done."""

    @property
    def waits_for(self) -> list[int]:
        """The ranks that it still waits for; empty where the transport does not know."""
        return []

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Block the host for at most `seconds`; return whether it is done. Not called again after that.

        Raises:
            UserError: another rank called something else.
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """

    def poll(self) -> None:  # noqa: B027  # most transports progress by themselves
        """Make progress without blocking, for transports that only progress when called."""

    def synchronize(self, seconds: float = math.inf) -> bool:
        """Make the result visible to what the caller does next: block the host, or the device's current stream.

        Returns:
            Whether that was possible within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self.wait(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True


class FinishedWork(PendingCollective):
    """Done when it was started."""

    def wait(self, seconds: float) -> bool:
        return True


class PolledWork(PendingCollective):
    """Done when a function returns True.

    Args:
        is_done: polled; raises what the connection or an abort has to say.
        collective: keeps its arrays alive until it is done.
        eager: for how many seconds a wait polls without pauses.
    """

    def __init__(self, is_done: Callable[[], bool], collective: Collective | None = None, eager: float = 0.0) -> None:
        self._is_done = is_done
        self._collective = collective
        self._eager = eager

    @property
    def waits_for(self) -> list[int]:
        return [] if self._collective is None else self._collective.message_peers

    def wait(self, seconds: float) -> bool:
        start = time.monotonic()
        while not self._is_done():
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            # A thousandth of the wait: a short operation is noticed at once, and a long one leaves the core to others.
            pause = 0.0 if waited < self._eager else min(_PAUSES[1], max(_PAUSES[0], waited / 1000))
            time.sleep(min(seconds - waited, pause))
        return True


class WorkSequence(PendingCollective):
    """Works one after the other, with computation between them.

    Args:
        steps: yields each work once the one before it is done; None where what follows waits for other ranks, so that
            it is done in `wait` alone, not in `poll`. Runs until its first work at once.
    """

    def __init__(self, steps: Iterator[PendingCollective | None]) -> None:
        self._steps = steps
        self._work = next(steps)
        self._error: BaseException | None = None

    @property
    def waits_for(self) -> list[int]:
        return [] if self._work is None else self._work.waits_for

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._work is None or self._work.wait(max(0.0, end - time.monotonic())):
            if not self._advance():
                return True
        return False

    def poll(self) -> None:
        while self._work is not None and self._work.wait(0.0):
            if not self._advance():
                self._work = None

    def _advance(self) -> bool:
        """Compute until the next work; whether there is one. Raises an error once more if it did before."""
        try:
            # A generator that has raised is exhausted: without this a second wait would take the failed work for done.
            if self._error is not None:
                raise self._error
            self._work = next(self._steps)
        except StopIteration:
            return False
        except BaseException as error:
            self._error = error
            raise
        return True


def reduce_pieces(pieces: list[Any], operator: ReduceOp) -> Any:
    """operator(pieces), a new host array; float16 is computed in float32 and rounded once."""
    dtype = pieces[0].dtype
    total = pieces[0].astype(np.float32 if dtype == np.float16 else dtype)
    for piece in pieces[1:]:
        _FUNCTIONS[operator](total, piece, out=total)
    if operator is ReduceOp.AVG:
        total /= len(pieces)
    return total.astype(dtype, copy=False)


def combine(collective: Collective, pieces: list[Any]) -> None:
    """Write to `collective.received`, a host array, what is made of the pieces that are meant for it, in rank order."""
    pattern, received = collective.pattern, collective.received
    if received is None:
        return
    if pattern is not None and pattern.reduces:
        assert collective.operator is not None
        result = _sum_bfloat16(pieces) if collective.is_bfloat16 else reduce_pieces(pieces, collective.operator)
    else:
        result = np.concatenate(pieces)
    received.reshape(-1)[:] = result


def _sum_bfloat16(pieces: list[Any]) -> Any:
    total = pieces[0].copy()
    for piece in pieces[1:]:
        add_bfloat16(piece, total)
    return total


def piece_of(collective: Collective, receiver: int, size: int) -> Any:
    """What of `collective.sent` is meant for a receiver; one-dimensional."""
    assert collective.sent is not None
    if collective.pattern is None or not collective.pattern.sliced:
        return collective.sent.reshape(-1)
    return rows(collective.sent, size)[receiver]


def rows(array: Array, count: int) -> list[Array]:
    """Views of `count` equal parts, each one-dimensional, of a contiguous array that may be empty."""
    flat = array.reshape(-1)
    length = flat.size // count
    return [flat[i * length : (i + 1) * length] for i in range(count)]


def _extent(array: Array | None, parts: int = 1) -> str:
    return "nothing" if array is None else f"{array.size // parts} {array.dtype}"


# -- the contract --------------------------------------------------------------------------------------


class Communicator(ABC):
    """One rank's end of a group.

    `abort` may be called from any thread: it wakes all waiters, and every later call raises AbortedError.

    Args:
        rank: from 0.
        size: the number of ranks.
        timeout: longest wait of the blocking helpers, in seconds; None: until `abort`.
    """

    memory = "host"
    """Where its arrays are: ``host`` or ``gpu``."""
    capturable = False
    """Whether its collectives may be captured in a CUDA graph."""
    asynchronous = False
    """Whether `all_reduce_async` is supported: it returns before the other ranks have started theirs."""
    overlaps = False
    """Whether a started all-reduce makes progress while the device computes."""
    compresses = False
    """Whether `all_reduce_async` sends two bytes for each number; `all_reduce` never does."""

    def __init__(self, rank: int, size: int, timeout: float | None = None) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout

    @abstractmethod
    def start(self, collective: Collective) -> PendingCollective:
        """Start a collective or message.

        Raises:
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Wake all waiters of this process with AbortedError, now and later. Thread-safe, idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport. Idempotent."""

    @property
    def completed(self) -> int | None:
        """How many all-reduces of `all_reduce_async` the device has done in this backward pass; None where unknown.

        Thread-safe: the watchdog's message names the bucket by it.
        """
        return None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new contiguous array in `memory`."""
        return np.empty(shape, dtype)

    def allocate_gradients(self, count: int) -> Array | None:
        """A float32 buffer (count,) that this transport reduces fastest, filled with 0; None if any will do.

        Called by all ranks before their first all-reduce. May change `overlaps`.
        """
        return None

    def wait_on_device(self, wait: Callable[[], None] | None = None) -> None:
        """Block the host until `wait` returns, or without it until the current stream is idle.

        On GPUs an eager rank must not run ahead of its peers, and `abort` ends the wait. Host arrays are ready anyway.

        Raises:
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """
        if wait is not None:
            wait()

    def all_reduce(self, array: Array, average: bool = True) -> None:
        """array = the mean, or the sum, over all ranks, in place: (P,), contiguous, equal dtype everywhere."""
        self._run(Collective(Op.ALL_REDUCE, array, array, ReduceOp.AVG if average else ReduceOp.SUM, blocking=True))

    def all_reduce_async(self, array: Array, timed: AbstractContextManager[None]) -> PendingCollective:
        """Start array = the mean over all ranks, if `asynchronous`; all ranks synchronize theirs in the same order.

        Args:
            array: (P,), contiguous.
            timed: entered where the all-reduce begins and left where it ends, with its stream current.
        """
        return self.start(Collective(Op.ALL_REDUCE, array, array, ReduceOp.AVG, overlap=timed))

    def broadcast(self, array: Array, root: int = 0) -> None:
        """array = the array of rank `root`, in place."""
        sent, received = (array, None) if self.rank == root else (None, array)
        self._run(Collective(Op.BROADCAST, sent, received, peer=root, blocking=True))

    def barrier(self) -> None:
        """Block the host until all ranks have called it."""
        self._run(Collective(Op.BARRIER, blocking=True))

    def sum(self, values: Any) -> Any:
        """The sum of all ranks' float64 host arrays, added in rank order; a new array."""
        own = np.ascontiguousarray(values, np.float64)
        rows = np.empty((self.size, *np.shape(values)), np.float64)
        self._run(Collective(Op.ALL_GATHER, own, rows, blocking=True))
        return np.add.reduce(rows, axis=0)

    def _run(self, collective: Collective) -> None:
        work = self.start(collective)
        if self._timeout is None:
            work.synchronize()
        elif not work.synchronize(self._timeout):
            ranks = ", ".join(map(str, work.waits_for))
            name = collective.op.value
            raise PeerError(f"{name}: rank {self.rank} has waited {self._timeout:g} s for rank {ranks}")
