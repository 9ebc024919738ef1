"""The TCP communicator: processes that share nothing but a store at rank 0. Slow, and needs neither MPI nor NCCL."""

from __future__ import annotations

import threading
from contextlib import suppress

from caffepy.errors import AbortedError, PeerError
from caffepy.parallel.communicators.collectives import Collective, Work
from caffepy.parallel.communicators.store_communicator import StoreCommunicator
from caffepy.parallel.store.store import Store


class TcpCommunicator(StoreCommunicator):
    """Host arrays among processes that share a store; all bytes go through the process that holds it.

    Args:
        store: what they share; not closed here.
        rank: this rank.
        size: the number of ranks.
        timeout: longest wait of the blocking helpers, in seconds.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float = 300.0) -> None:
        super().__init__(store, rank, size, timeout)
        self._aborted = threading.Event()

    def start(self, collective: Collective) -> Work:
        if self._aborted.is_set():
            raise AbortedError("the communicator was aborted")
        return super().start(collective)

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            with suppress(PeerError):  # rank 0 is gone, and with it all waits
                self._store.fail(f"rank {self.rank} has stopped")

    def close(self) -> None:
        """Nothing: the store belongs to others."""
