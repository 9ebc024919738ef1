"""Every collective over a store: `start` puts this rank's contribution, `PendingCollective.wait` takes those of the
others.

Over TCP all bytes go through rank 0, which has the store: slow, and needs neither MPI nor NCCL. Plain, so other
communicators are tested against it. `start` never waits for another rank.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np

from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    FinishedWork,
    Op,
    PendingCollective,
    combine,
    piece_of,
)
from caffepy.distributed.store.store import Store, Value
from caffepy.errors import AbortedError, PeerError, UserError

_HEADER = 128
"""Bytes before the numbers: what the sender called."""


class StoreCommunicator(Communicator):
    """Host arrays among ranks that share a store.

    Args:
        store: what they share; not closed here.
        rank: this rank.
        size: the number of ranks.
        timeout: longest wait of the blocking helpers, in seconds; None: until `abort`.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float | None = None) -> None:
        super().__init__(rank, size, timeout)
        self._store = store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._aborted = threading.Event()

    def start(self, collective: Collective) -> PendingCollective:
        if self._aborted.is_set():
            raise AbortedError("the communicator was aborted")
        if collective.op is Op.SEND:
            assert collective.peer is not None
            self._put(self._message(self.rank, collective.peer, collective.tag, "sent"), collective, 0, 1)
            return FinishedWork()
        if collective.op is Op.RECEIVE:
            assert collective.peer is not None
            key = self._message(collective.peer, self.rank, collective.tag, "received")
            return StoreWork(self._store, collective, {collective.peer: key}, self.size)
        return self._start_collective(collective)

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            with suppress(PeerError):  # rank 0 is gone, and with it all waits
                self._store.fail(f"rank {self.rank} has stopped")

    def close(self) -> None:
        """Nothing: the store belongs to others."""

    def _start_collective(self, collective: Collective) -> PendingCollective:
        pattern = collective.pattern
        assert pattern is not None
        # All ranks start the same collectives in the same order, so equal counts name the same collective.
        number = self._next("collective")
        receivers, senders = pattern.receivers(self.size, collective.peer), pattern.senders(self.size, collective.peer)
        if self.rank in senders:
            if pattern.sliced:
                for receiver in receivers:
                    self._put(f"{number}/{self.rank}/{receiver}", collective, receiver, 1)
            else:
                self._put(f"{number}/{self.rank}", collective, 0, len(receivers))
        if self.rank not in receivers:
            return FinishedWork()
        suffix = f"/{self.rank}" if pattern.sliced else ""
        return StoreWork(
            self._store, collective, {sender: f"{number}/{sender}{suffix}" for sender in senders}, self.size
        )

    def _put(self, key: str, collective: Collective, receiver: int, reads: int) -> None:
        # Sent along, so that ranks that call different collectives get an error instead of wrong numbers.
        header = collective.describe(self.size).encode().ljust(_HEADER)
        assert len(header) == _HEADER
        numbers = b"" if collective.sent is None else piece_of(collective, receiver, self.size)
        self._store.put(key, b"".join((header, memoryview(numbers).cast("B"))), reads)

    def _message(self, sender: int, receiver: int, tag: int, end: str) -> str:
        """The key of the next message from one rank to another, counted at each end."""
        way = f"{sender}>{receiver}#{tag}"
        return f"{way}/{self._next(f'{end} {way}')}"

    def _next(self, what: str) -> int:
        with self._lock:
            self._counts[what] += 1
            return self._counts[what]


class StoreWork(PendingCollective):
    """An operation that has to take something from the store.

    Args:
        store: the store.
        collective: the call.
        keys: of the values to take, by the rank that puts each.
        size: how many ranks there are.
    """

    def __init__(self, store: Store, collective: Collective, keys: dict[int, str], size: int) -> None:
        self._store = store
        self._collective = collective
        self._missing = dict(keys)
        self._pieces: dict[int, Any] = {}
        self._size = size

    @property
    def waits_for(self) -> list[int]:
        return list(self._missing)

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        # What came is kept: a later wait asks for the rest only.
        for sender, key in list(self._missing.items()):
            value = self._store.take(key, max(0.0, deadline - time.monotonic()), sender)
            if value is None:
                return False
            del self._missing[sender]
            self._pieces[sender] = self._decode(sender, value)
        # In rank order, whatever order they came in: the sum has the same bits on all ranks and in each run.
        combine(self._collective, [self._pieces[sender] for sender in sorted(self._pieces)])
        self._pieces.clear()
        return True

    def _decode(self, sender: int, value: Value) -> Any:
        theirs, own = value[:_HEADER].decode().strip(), self._collective.describe(self._size)
        if theirs != own:
            we, they = ("calls", "calls") if self._collective.pattern else ("expects a", "sent a")
            raise UserError(f"this rank {we} '{own}', rank {sender} {they} '{theirs}'")
        received = self._collective.received
        return np.frombuffer(value, np.uint8 if received is None else received.dtype, offset=_HEADER)
