"""A key-value store through which the devices of a job meet, hand each other bytes, and hear of each other's end.

`MemoryStore` is the store itself, for threads of one process; `store/server.py` shows it to other processes and
`store/client.py` is how they see it.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Protocol

from caffepy.errors import PeerError, UserError

MEMBERS = "members"
"""The key under which the list of all members appears once they have joined."""
MISSING = "missing"
"""The key of the list of ranks that have not joined."""


Value = bytes | bytearray


@dataclass(frozen=True)
class Member:
    """Who a rank is.

    Args:
        host: its machine's name.
        machine: what tells machines apart whatever they are called.
        process: its process's number there.
    """

    host: str
    machine: str
    process: int


@dataclass(frozen=True)
class State:
    """What a rank said of itself last.

    Args:
        collectives: how many collectives it had begun.
        waiting: the operation that it waited in; empty where it did not wait.
        seconds: how long ago that was.
        left: it has left the job.
    """

    collectives: int = 0
    waiting: str = ""
    seconds: float = 0.0
    left: bool = False


class Store(Protocol):
    """What a rank can do with the store. Waits take at most the seconds that they are given."""

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        """Keep a value until it was taken `reads` times; 0: for good. Never waits for another rank."""

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        """The value of a key, waiting for it; None where it did not come.

        Args:
            owner: the rank that puts it: if it has left there is nothing to wait for.

        Raises:
            PeerError: a rank has failed, or the owner has left, and the value is not there.
        """

    def watch(self, state: State, seconds: float) -> str | None:
        """Say what this rank does and wait for news of a failure; ends early when this rank leaves."""

    def states(self) -> dict[int, State]:
        """What each rank that was heard said last."""

    def fail(self, message: str) -> None:
        """End everybody's waits; the first message is kept."""

    def leave(self, state: State) -> None:
        """This rank's end is no failure; its last state."""

    def close(self) -> None:
        """Give back what it holds; callable twice."""


class MemoryStore:
    """The store itself.

    Args:
        size: how many ranks share it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._values: dict[str, tuple[Value, int]] = {}
        self._members: dict[int, Member] = {}
        self._states: dict[int, tuple[State, float]] = {}
        self._left: set[int] = set()
        self._failure: str | None = None
        self._told: set[int] = set()
        """The ranks that have heard of the failure."""

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
            self._members[rank] = member
            missing = [other for other in range(size) if other not in self._members]
            self._values[MISSING] = json.dumps(missing).encode(), 0
            if not missing:
                members = [asdict(self._members[i]) for i in range(size)]
                self._values[MEMBERS] = json.dumps(members).encode(), 0
            self._changed.notify_all()

    def staying(self) -> list[int]:
        """Ranks that have joined and not left."""
        with self._changed:
            return [rank for rank in sorted(self._members) if rank not in self._left]

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        with self._changed:
            self._values[key] = value, reads
            self._changed.notify_all()

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        def settled() -> bool:
            return key in self._values or self._failure is not None or owner in self._left

        with self._changed:
            self._changed.wait_for(settled, seconds)
            if key in self._values:
                return self._read(key)
            if self._failure is not None:
                raise PeerError(self._failure)
            if owner is not None and owner in self._left:
                raise PeerError(f"{self._name(owner)} has left")
            return None

    def watch_rank(self, rank: int, state: State, seconds: float) -> str | None:
        """`Store.watch` of a rank."""
        with self._changed:
            self._states[rank] = state, time.monotonic()
            self._changed.wait_for(lambda: self._failure is not None or rank in self._left, seconds)
            if self._failure is not None:
                self._told.add(rank)
                self._changed.notify_all()
            return self._failure

    def states(self) -> dict[int, State]:
        with self._changed:
            now = time.monotonic()
            return {
                rank: State(state.collectives, state.waiting, now - heard, rank in self._left)
                for rank, (state, heard) in self._states.items()
            }

    def fail(self, message: str) -> None:
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    def lose(self, rank: int) -> None:
        """A rank's connection has closed; a failure unless it has left."""
        with self._changed:
            if rank not in self._left:
                self.fail(
                    f"{self._name(rank)} ended unexpectedly: it was killed, crashed, lost its network or ended without "
                    f"destroy_process_group()"
                )
                self._left.add(rank)
                self._changed.notify_all()

    def leave_rank(self, rank: int, state: State) -> None:
        """`Store.leave` of a rank."""
        with self._changed:
            self._states[rank] = state, time.monotonic()
            self._left.add(rank)
            self._changed.notify_all()

    def wait_alone(self, rank: int, seconds: float) -> bool:
        """Wait until all others that joined have left; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: set(self._members) <= self._left | {rank}, seconds)

    def wait_told(self, rank: int, seconds: float) -> None:
        """Wait until all others that joined have left or heard of the failure; they ask for it at their own time."""
        with self._changed:
            self._changed.wait_for(lambda: set(self._members) <= self._left | self._told | {rank}, seconds)

    def _read(self, key: str) -> Value:
        value, reads = self._values[key]
        if reads == 1:
            del self._values[key]
        elif reads > 1:
            self._values[key] = value, reads - 1
        return value

    def _name(self, rank: int) -> str:
        member = self._members.get(rank)
        return f"rank {rank}" if member is None else f"rank {rank} on {member.host} (process {member.process})"


class RankStore:
    """A `MemoryStore` as one of its ranks sees it.

    Args:
        memory: the store.
        rank: the rank.
    """

    def __init__(self, memory: MemoryStore, rank: int) -> None:
        self.memory = memory
        self._rank = rank
        self.put = memory.put
        self.take = memory.take
        self.states = memory.states
        self.fail = memory.fail

    def watch(self, state: State, seconds: float) -> str | None:
        return self.memory.watch_rank(self._rank, state, seconds)

    def leave(self, state: State) -> None:
        self.memory.leave_rank(self._rank, state)

    def close(self) -> None:
        """Nothing: the store goes with its last owner."""
