"""A key-value store through which the devices of a job exchange bytes and learn of each other's end.

`MemoryStore` is the store itself, and `LocalControlChannel` a rank's access to it within the same process. `server.py`
shows it to other processes, and `client.py` is how they see it.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from caffepy.distributed.store.wire import DeviceStatus, Failure, Member, encode
from caffepy.distributed.store.wire import Value as Value
from caffepy.errors import PeerError, UserError
from caffepy.utils.clocks import suspend_aware_seconds

MEMBERS = "members"
"""The key under which the list of all members appears once they have joined."""
MISSING = "missing"
"""The key of the list of ranks that have not joined."""


class Store(ABC):
    """Values that ranks hand each other. Waits take at most the seconds that they are given."""

    @abstractmethod
    def put(self, key: str, value: Value, reads: int = 0) -> None:
        """Keep a value until it was taken `reads` times; 0: for good. Never waits for another rank."""

    @abstractmethod
    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        """The value of a key, waiting for it; None where it did not come.

        Args:
            owner: the rank that puts it: if it has left there is nothing to wait for.

        Raises:
            PeerError: a rank has failed, or the owner has left, and the value is not there.
        """

    @abstractmethod
    def publish(self, failure: Failure) -> None:
        """End all waits. Rank 0 learns of it at once, others once it was reported. Never waits, never raises."""

    def fail(self, message: str) -> None:
        """End all waits with a failure that need not be reported; the first message is kept."""
        self.publish(Failure(message, reported=True))


class ControlChannel(Store):
    """A rank's access to the store, which is also how ranks hear of each other."""

    @abstractmethod
    def watch(self, statuses: Sequence[DeviceStatus], seconds: float) -> Failure | None:
        """Say what this rank's devices do (a heartbeat) and wait for a failure; ends early when this rank leaves.

        Called by one thread alone.

        Raises:
            PeerError: rank 0 has ended.
        """

    @abstractmethod
    def statuses(self) -> list[DeviceStatus]:
        """What all devices that were heard of did last."""

    @abstractmethod
    def leave(self, statuses: Sequence[DeviceStatus]) -> None:
        """This rank ends in good order; its last statuses. Never waits, never raises."""

    def wait_alone(self, seconds: float) -> list[int]:
        """On rank 0 of several processes, wait until all others have left; the ranks that have not."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Idempotent."""


def lost_from_group(name: str, statuses: Sequence[DeviceStatus]) -> Failure:
    """What a process group says of a process that ended without leaving."""
    why = "it was killed, crashed, lost its network or ended without destroy_process_group()"
    return Failure(f"{name} ended unexpectedly: {why}", reported=True)


def lost_from_training(name: str, statuses: Sequence[DeviceStatus]) -> Failure:
    """What training says of a process that ended without leaving."""
    iteration = max((status.iteration for status in statuses), default=0)
    why = "it was killed, crashed or lost its network; training is stopped"
    return Failure(f"{name} at iteration {iteration} ended unexpectedly: {why}")


class MemoryStore(Store):
    """The store itself.

    Args:
        size: how many ranks share it.
        describe_loss: makes a failure of the name of a rank that ended without leaving, and all devices' statuses.
    """

    def __init__(
        self, size: int, describe_loss: Callable[[str, Sequence[DeviceStatus]], Failure] = lost_from_group
    ) -> None:
        self.size = size
        self._describe_loss = describe_loss
        # Its lock is reentrant: `watch` and `wait_alone` call methods that take it again.
        self._changed = threading.Condition()
        self._values: dict[str, tuple[Value, int]] = {}
        self._members: dict[int, Member] = {}
        self._heartbeats: dict[int, tuple[Sequence[DeviceStatus], float]] = {}
        self._left: set[int] = set()
        self._failure: Failure | None = None
        self._publishers: set[int] = set()
        """Ranks that published the failure and need not receive it."""
        self._listeners: dict[int, Callable[[Failure], None]] = {}

    # -- members ------------------------------------------------------------------------------------

    def join(self, rank: int, size: int, member: Member) -> None:
        """Enter a rank; once all are in, `MEMBERS` appears.

        Raises:
            UserError: the rank is taken or beyond the size, or the sizes differ.
        """
        with self._changed:
            if size != self.size:
                raise UserError(f"rank {rank} was started with a world size of {size}, rank 0 with {self.size}")
            if not 0 <= rank < size:
                raise UserError(f"there is no rank {rank} in a world of {size}: ranks count from 0 to {size - 1}")
            if rank in self._members:
                raise UserError(f"two processes call themselves rank {rank}: one is {self._name(rank)}")
            self._members[rank] = Member(member.host, member.machine, member.process)
            missing = [other for other in range(size) if other not in self._members]
            # Kept up to date, so that a rank whose time is up can name the ranks that have not come.
            self._values[MISSING] = json.dumps(missing).encode(), 0
            if not missing:
                self._values[MEMBERS] = encode([self._members[i] for i in range(size)]), 0
            self._changed.notify_all()

    def staying(self) -> list[int]:
        """Ranks that have joined and not left."""
        with self._changed:
            return [rank for rank in sorted(self._members) if rank not in self._left]

    def leave(self, rank: int, statuses: Sequence[DeviceStatus]) -> None:
        with self._changed:
            self._heartbeats[rank] = statuses, suspend_aware_seconds()
            self._left.add(rank)
            self._changed.notify_all()

    def lose(self, rank: int) -> None:
        """A rank's connection has closed; a failure unless it has left."""
        # A good-bye came before the end of the connection.
        if rank in self._left:
            return
        self.publish(self._describe_loss(self._name(rank), self.statuses()))
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait_alone(self, rank: int, seconds: float) -> list[int]:
        """Wait until all others that joined have left; returns the ranks that have not."""
        with self._changed:
            self._changed.wait_for(lambda: set(self.staying()) <= {rank}, seconds)
            return [other for other in self.staying() if other != rank]

    # -- values -------------------------------------------------------------------------------------

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        with self._changed:
            self._values[key] = value, reads
            self._changed.notify_all()

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        def is_decided() -> bool:
            return key in self._values or self._failure is not None or owner in self._left

        with self._changed:
            self._changed.wait_for(is_decided, seconds)
            # A value that is there is given even after a failure: the rank may need it to end in order.
            if key in self._values:
                return self._read(key)
            if self._failure is not None:
                raise PeerError(self._failure.message)
            if owner is not None and owner in self._left:
                raise PeerError(f"{self._name(owner)} has left")
            return None

    # -- heartbeats and failures --------------------------------------------------------------------

    def record_heartbeat(self, rank: int, statuses: Sequence[DeviceStatus]) -> None:
        with self._changed:
            self._heartbeats[rank] = statuses, suspend_aware_seconds()

    def statuses(self) -> list[DeviceStatus]:
        """The last heartbeats; one status without a device for a rank that has not named its devices yet."""
        with self._changed:
            now = suspend_aware_seconds()
            return [
                replace(status, rank=rank, silent=now - heard, left=rank in self._left)
                for rank, (statuses, heard) in sorted(self._heartbeats.items())
                for status in statuses or [self._status_without_device(rank)]
            ]

    def watch(self, rank: int, statuses: Sequence[DeviceStatus], seconds: float) -> Failure | None:
        """`ControlChannel.watch` of a rank of this process."""
        with self._changed:
            self.record_heartbeat(rank, statuses)
            self._changed.wait_for(lambda: self._failure_for(rank) is not None or rank in self._left, seconds)
            return self._failure_for(rank)

    def publish(self, failure: Failure, publisher: int | None = None) -> None:
        """`Store.publish` by `publisher`, a rank of this process that need not receive it.

        The first failure is kept, until the same or another one was reported.
        """
        with self._changed:
            # The first failure is the cause, and further ones are mostly its consequences. Only the news that the user
            # was told may replace it.
            if self._failure is not None and not (failure.reported and not self._failure.reported):
                return
            self._failure = failure
            if publisher is not None:
                self._publishers.add(publisher)
            # Rank 0 closes its connections as soon as it is notified: the others get the failure before.
            for listener in self._listeners.values() if failure.reported else ():
                listener(failure)
            self._changed.notify_all()

    def listen(self, rank: int, listener: Callable[[Failure], None]) -> None:
        """Have `listener`, which must neither wait nor raise, called when a rank has to learn of a failure."""
        with self._changed:
            self._listeners[rank] = listener
            # A failure from before the rank listened: `publish` has not told it.
            failure = self._failure_for(rank)
        if failure is not None:
            listener(failure)

    def _failure_for(self, rank: int) -> Failure | None:
        failure = self._failure
        # Others hear of a failure only once rank 0 has printed it: they end then, and a launcher may kill rank 0 when
        # the first process ends.
        if failure is None or rank in self._publishers or (rank != 0 and not failure.reported):
            return None
        return failure

    def _read(self, key: str) -> Value:
        value, reads = self._values[key]
        # The last reader takes the value with it: a long run would otherwise keep every exchanged array.
        if reads == 1:
            del self._values[key]
        elif reads > 1:
            self._values[key] = value, reads - 1
        return value

    def _status_without_device(self, rank: int) -> DeviceStatus:
        member = self._members.get(rank)
        return DeviceStatus(rank) if member is None else DeviceStatus(rank, member.host, member.process)

    def _name(self, rank: int) -> str:
        member = self._members.get(rank)
        return f"rank {rank}" if member is None else member.name(rank)


class LocalControlChannel(ControlChannel):
    """A rank's access to a store of its own process.

    Args:
        memory: the store.
        rank: the rank.
    """

    def __init__(self, memory: MemoryStore, rank: int) -> None:
        self.memory = memory
        self._rank = rank

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        self.memory.put(key, value, reads)

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        return self.memory.take(key, seconds, owner)

    def watch(self, statuses: Sequence[DeviceStatus], seconds: float) -> Failure | None:
        return self.memory.watch(self._rank, statuses, seconds)

    def statuses(self) -> list[DeviceStatus]:
        return self.memory.statuses()

    def wait_alone(self, seconds: float) -> list[int]:
        return self.memory.wait_alone(self._rank, seconds)

    def publish(self, failure: Failure) -> None:
        self.memory.publish(failure, self._rank)

    def leave(self, statuses: Sequence[DeviceStatus]) -> None:
        self.memory.leave(self._rank, statuses)

    def close(self) -> None:
        """The store goes with its last owner."""
