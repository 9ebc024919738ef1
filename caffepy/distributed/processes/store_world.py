"""The world of processes that joined rank 0's store without MPI: they exchange plain Python values through it.

Values are read without unpickling anything.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NoReturn, TypeVar

from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.store_communicator import StoreCommunicator
from caffepy.distributed.processes.launcher import StoreAddress
from caffepy.distributed.processes.world import World, end_process, machine_identity
from caffepy.distributed.store.client import ControlClient
from caffepy.distributed.store.records import Failure, Member
from caffepy.distributed.store.rendezvous import find_secret, join_store, listen
from caffepy.distributed.store.store import ControlChannel, MemoryStore, Store, lost_from_training
from caffepy.distributed.store.values import pack, unpack
from caffepy.distributed.store.wire import Value
from caffepy.errors import AbortedError, PeerError

T = TypeVar("T")

_JOIN_SECONDS = 300.0
"""How long ranks wait for each other: a cluster starts them one after the other."""
_POLL_SECONDS = 0.2
"""Between looks whether this process has to end, while a value is waited for."""
_FAILURE_SECONDS = 3.0
"""How long a failed access to the store waits for the monitor, which knows the rank at fault, to end the run."""
_LEAVE_SECONDS = 10.0
"""How long rank 0 stays for the others to leave in good order."""
_END_SECONDS = 3.0
"""How long rank 0 stays after a failure, so that the others hear of it and not of rank 0's end."""


class StoreWorld(World):
    """The processes that share rank 0's store.

    Args:
        rank: this process's number.
        address: where rank 0 listens.
        timeout: longest wait for all to come, in seconds.

    Raises:
        UserError: rank 0 cannot listen there, or refuses this rank.
        PeerError: not all came in time.
    """

    transport = "tcp"
    serves = False

    def __init__(self, rank: int, address: StoreAddress, timeout: float = _JOIN_SECONDS) -> None:
        self._check: Callable[[], None] = lambda: None
        self._exchanges = 0
        self._communicators = 0
        where = f"{address.host}:{address.port}"
        secret = find_secret(os.environ, "training without MPI", where, warns=rank == 0)
        own = Member(socket.gethostname(), machine_identity(), os.getpid())

        def connect() -> ControlChannel:
            at = address.host, address.port
            if rank == 0:
                return listen(MemoryStore(address.size, lost_from_training), own, at, secret, address.near)
            # While rank 0 is suspended its answers are late: how long that may last is the watchdog's to judge.
            return ControlClient(lambda: ([at], secret), rank, address.size, own, timeout, grace=timeout)

        members, self._store = join_store(rank, own, connect, timeout, f"the ranks' rendezvous at {where}")
        super().__init__(rank, [member.host for member in members], [member.machine for member in members])
        self.channel = self._store

    def all_gather(self, value: T) -> list[T]:
        key = self._next_key()
        if self.rank != 0:
            self._store.put(f"{key}/{self.rank}", pack(value), 1)
            gathered: list[T] = self._take(key, 0)
            return gathered
        values = [value, *(self._take(f"{key}/{rank}", rank) for rank in range(1, self.size))]
        self._store.put(key, pack(values), self.size - 1)
        return values

    def broadcast(self, value: T) -> T:
        key = self._next_key()
        if self.rank != 0:
            received: T = self._take(key, 0)
            return received
        self._store.put(key, pack(value), self.size - 1)
        return value

    def watch(self, check: Callable[[], None]) -> None:
        self._check = check

    def serve(self) -> None:
        """Nothing: any thread may use the store."""

    def communicator(self) -> Communicator:
        self._communicators += 1
        return StoreCommunicator(_Arrays(self._store, f"{self._communicators}:"), self.rank, self.size, None)

    def close(self) -> None:
        self._store.leave([])
        self._store.wait_alone(_LEAVE_SECONDS)
        self._store.close()

    def end(self, status: int) -> NoReturn:
        self._store.wait_alone(_END_SECONDS)
        end_process(status)

    def _next_key(self) -> str:
        self._exchanges += 1
        return f"exchange {self._exchanges}"

    def _take(self, key: str, owner: int) -> Any:
        try:
            while (value := self._store.take(key, _POLL_SECONDS, owner)) is None:
                self._check()
            return unpack(value)
        except PeerError:
            end = time.monotonic() + _FAILURE_SECONDS
            while time.monotonic() < end:
                self._check()
                time.sleep(_POLL_SECONDS / 10)
            raise


class _Arrays(Store):
    """One communicator's part of the store; to abort it concerns this process alone.

    Args:
        store: the ranks'.
        prefix: of its keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._stopped = Event()

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        with self._failing_late():
            self._store.put(self._prefix + key, value, reads)

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        with self._failing_late():
            return self._store.take(self._prefix + key, seconds, owner)

    def publish(self, failure: Failure) -> None:
        self._stopped.set()

    @contextmanager
    def _failing_late(self) -> Iterator[None]:
        """Let a failure that ends a wait be told by the monitor, which knows more, and which ends all waits here."""
        if self._stopped.is_set():
            raise AbortedError("training was stopped")
        try:
            yield
        except PeerError as error:
            if self._stopped.wait(_FAILURE_SECONDS):
                raise AbortedError("training was stopped") from error
            raise
