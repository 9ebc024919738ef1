"""Operations among devices as values: what each means, in plain NumPy, and what a communicator returns for one.

Communicators carry an `Operation` out with `start`, each in its own way; those that move bytes and nothing else
(`store_operations.py`) compute with the functions below, and so do the tests of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from caffepy.backend.types import Array
from caffepy.parallel.communicators.compression import add_bfloat16


class Operator(Enum):
    """How arrays of several devices become one, element by element. AVG, the mean, is for floating-point numbers."""

    SUM = "SUM"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    AVG = "AVG"


_FUNCTIONS: dict[Operator, Callable[..., Any]] = {
    Operator.SUM: np.add,
    Operator.PRODUCT: np.multiply,
    Operator.MIN: np.minimum,
    Operator.MAX: np.maximum,
    Operator.AVG: np.add,
}


@dataclass(frozen=True)
class Kind:
    """What a collective does.

    Args:
        how: what a receiver makes of the pieces it gets, in the order of ranks: ``copy`` (there is one), ``stack`` them
            or ``reduce`` them by the operator; ``nothing`` moves no numbers.
        sliced: a sender's array has a piece for each receiver, in the order of ranks; else all get the whole.
        from_root: the root alone sends.
        to_root: the root alone receives.
    """

    how: str
    sliced: bool = False
    from_root: bool = False
    to_root: bool = False

    def senders(self, size: int, root: int | None) -> list[int]:
        """The ranks whose pieces a receiver gets."""
        return [root] if self.from_root and root is not None else list(range(size))

    def receivers(self, size: int, root: int | None) -> list[int]:
        """The ranks that get a piece of a sender."""
        return [root] if self.to_root and root is not None else list(range(size))


COLLECTIVES = {
    "all_reduce": Kind("reduce"),
    "reduce": Kind("reduce", to_root=True),
    "reduce_scatter": Kind("reduce", sliced=True),
    "broadcast": Kind("copy", from_root=True),
    "scatter": Kind("copy", sliced=True, from_root=True),
    "all_gather": Kind("stack"),
    "gather": Kind("stack", to_root=True),
    "all_to_all": Kind("stack", sliced=True),
    "barrier": Kind("nothing"),
}


@dataclass(frozen=True)
class Operation:
    """One device's call of an operation. Arrays are contiguous and of one dtype.

    Args:
        name: one of `COLLECTIVES`, ``send`` or ``receive``.
        sent: this device's contribution; None where it gives nothing.
        received: what the result is written to, possibly `sent` itself; None where it gets nothing.
        operator: of a reduction.
        peer: the root, or the other end of a send or receive.
        tag: tells several messages between two devices apart.
        compact: a sum of numbers of two bytes, rounded after each addition, so that nothing longer has to travel:
            float16, or bfloat16 in an array of uint16.
    """

    name: str
    sent: Array | None = None
    received: Array | None = None
    operator: Operator | None = None
    peer: int | None = None
    tag: int = 0
    compact: bool = False

    @property
    def bfloat16(self) -> bool:
        """Whether an array of uint16 holds bfloat16 numbers."""
        return self.compact and self.received is not None and self.received.dtype == np.uint16

    @property
    def kind(self) -> Kind | None:
        """None for a send or receive."""
        return COLLECTIVES.get(self.name)

    def describe(self, size: int) -> str:
        """What all ranks must agree on, as messages show it: ``all_reduce SUM of 4 float32``."""
        if self.kind is None:
            array = self.received if self.sent is None else self.sent
            return f"message of {_extent(array)}"
        root = "" if self.peer is None else f" {'from' if self.kind.from_root else 'to'} rank {self.peer}"
        operator = "" if self.operator is None else f" {self.operator.value}"
        array = self.received if self.sent is None else self.sent
        parts = size if self.kind.sliced and self.sent is not None else 1
        return f"{self.name}{operator}{root}" + ("" if array is None else f" of {_extent(array, parts)}")


class Work(Protocol):
    """An operation that was started."""

    @property
    def waits_for(self) -> list[int]:
        """The ranks that it still waits for, where that is known; else empty."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for its end; whether it came. The result is there, and `sent` is free, only then. Not
        called again after that.

        Raises:
            UserError: another rank called something else.
            AbortedError: the communicator was aborted.
            PeerError: the connection failed.
        """


class Finished:
    """The `Work` of an operation that ended when it was started."""

    waits_for: list[int] = []

    def wait(self, seconds: float) -> bool:
        return True


def reduce_pieces(pieces: list[Any], operator: Operator) -> Any:
    """operator(pieces), a new host array; float16 is computed in float32 and rounded once."""
    dtype = pieces[0].dtype
    total = pieces[0].astype(np.float32 if dtype == np.float16 else dtype)
    for piece in pieces[1:]:
        _FUNCTIONS[operator](total, piece, out=total)
    if operator is Operator.AVG:
        total /= len(pieces)
    return total.astype(dtype, copy=False)


def combine(operation: Operation, pieces: list[Any]) -> None:
    """Write to `operation.received`, a host array, what its collective makes of the pieces that are meant for it."""
    kind, received = operation.kind, operation.received
    if received is None or kind is None or kind.how == "nothing":
        return
    if kind.how == "reduce":
        assert operation.operator is not None
        result = _sum_bfloats(pieces) if operation.bfloat16 else reduce_pieces(pieces, operation.operator)
    else:
        result = np.concatenate(pieces)
    received.reshape(-1)[:] = result


def _sum_bfloats(pieces: list[Any]) -> Any:
    total = pieces[0].copy()
    for piece in pieces[1:]:
        add_bfloat16(piece, total)
    return total


def piece_of(operation: Operation, receiver: int, size: int) -> Any:
    """What of `operation.sent` is meant for a receiver; one-dimensional."""
    assert operation.sent is not None
    if operation.kind is None or not operation.kind.sliced:
        return operation.sent.reshape(-1)
    return rows(operation.sent, size)[receiver]


def rows(array: Array, count: int) -> list[Array]:
    """Views of `count` equal parts, each one-dimensional, of a contiguous array that may be empty."""
    flat = array.reshape(-1)
    length = flat.size // count
    return [flat[i * length : (i + 1) * length] for i in range(count)]


def _extent(array: Array | None, parts: int = 1) -> str:
    return "nothing" if array is None else f"{array.size // parts} {array.dtype}"
