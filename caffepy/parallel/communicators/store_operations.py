"""Every operation over a store: contributions are put there at once, others' are taken when they are waited for.

Slow and plain, so it is what other communicators are tested against. Nothing that is started waits for another rank:
no thread is needed for operations to go on, and none can keep another from beginning.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from caffepy.errors import UserError
from caffepy.parallel.communicators.collectives import Finished, Operation, Work, combine, piece_of
from caffepy.parallel.store.store import Store, Value

_HEADER = 128
"""Bytes before the numbers: what the sender called."""


class StoreOperations:
    """Carries out operations among ranks that share a store.

    Args:
        store: what they share.
        rank: this rank.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._lock = threading.Lock()
        self._begun: Counter[str] = Counter()

    def start(self, operation: Operation) -> Work:
        """`GroupCommunicator.start`."""
        if operation.name == "send":
            assert operation.peer is not None
            self._put(self._message(self._rank, operation.peer, operation.tag, "sent"), operation, 0, 1)
            return Finished()
        if operation.name == "receive":
            assert operation.peer is not None
            key = self._message(operation.peer, self._rank, operation.tag, "received")
            return StoreWork(self._store, operation, {operation.peer: key}, self._size)
        return self._start_collective(operation)

    def _start_collective(self, operation: Operation) -> Work:
        kind = operation.kind
        assert kind is not None
        number = self._next("collective")
        receivers, senders = kind.receivers(self._size, operation.peer), kind.senders(self._size, operation.peer)
        if self._rank in senders:
            if kind.sliced:
                for receiver in receivers:
                    self._put(f"{number}/{self._rank}/{receiver}", operation, receiver, 1)
            else:
                self._put(f"{number}/{self._rank}", operation, 0, len(receivers))
        if self._rank not in receivers:
            return Finished()
        suffix = f"/{self._rank}" if kind.sliced else ""
        return StoreWork(
            self._store, operation, {sender: f"{number}/{sender}{suffix}" for sender in senders}, self._size
        )

    def _put(self, key: str, operation: Operation, receiver: int, reads: int) -> None:
        header = operation.describe(self._size).encode().ljust(_HEADER)
        assert len(header) == _HEADER
        numbers = b"" if operation.sent is None else piece_of(operation, receiver, self._size)
        self._store.put(key, b"".join((header, memoryview(numbers).cast("B"))), reads)

    def _message(self, sender: int, receiver: int, tag: int, end: str) -> str:
        """The key of the next message from one rank to another, counted at each end."""
        way = f"{sender}>{receiver}#{tag}"
        return f"{way}/{self._next(f'{end} {way}')}"

    def _next(self, what: str) -> int:
        with self._lock:
            self._begun[what] += 1
            return self._begun[what]


class StoreWork:
    """An operation that has to take something from the store.

    Args:
        store: the store.
        operation: what was called.
        keys: of the values to take, by the rank that puts each.
        size: how many ranks there are.
    """

    def __init__(self, store: Store, operation: Operation, keys: dict[int, str], size: int) -> None:
        self._store = store
        self._operation = operation
        self._missing = dict(keys)
        self._pieces: dict[int, Any] = {}
        self._size = size

    @property
    def waits_for(self) -> list[int]:
        return list(self._missing)

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for sender, key in list(self._missing.items()):
            value = self._store.take(key, max(0.0, deadline - time.monotonic()), sender)
            if value is None:
                return False
            del self._missing[sender]
            self._pieces[sender] = self._decode(sender, value)
        self._finish()
        return True

    def _decode(self, sender: int, value: Value) -> Any:
        theirs, own = value[:_HEADER].decode().strip(), self._operation.describe(self._size)
        if theirs != own:
            we, they = ("calls", "calls") if self._operation.kind else ("expects a", "sent a")
            raise UserError(f"this rank {we} '{own}', rank {sender} {they} '{theirs}'")
        received = self._operation.received
        return np.frombuffer(value, np.uint8 if received is None else received.dtype, offset=_HEADER)

    def _finish(self) -> None:
        if self._operation.kind is not None:
            combine(self._operation, [self._pieces[sender] for sender in sorted(self._pieces)])
        elif self._operation.received is not None:
            (message,) = self._pieces.values()
            self._operation.received.reshape(-1)[:] = message
        self._pieces.clear()
