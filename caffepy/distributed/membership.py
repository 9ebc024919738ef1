"""Who belongs to a process group, and what connects them besides the communicator."""

from __future__ import annotations

from dataclasses import dataclass

from caffepy.parallel.processes.world import World
from caffepy.parallel.store.server import StoreServer
from caffepy.parallel.store.store import Member, MemoryStore, Store


@dataclass
class Membership:
    """This process's place in a group.

    Args:
        rank: its number.
        members: all processes, in the order of ranks.
        store: what they share.
        memory: on rank 0, the store itself.
        server: on rank 0, what shows it to the others.
        world: the processes as MPI knows them, where MPI started them.
    """

    rank: int
    members: list[Member]
    store: Store
    memory: MemoryStore | None = None
    server: StoreServer | None = None
    world: World | None = None

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.members)

    @property
    def local_rank(self) -> int:
        """This process's number among those of its machine."""
        return self._neighbours(self.rank)

    @property
    def local_size(self) -> int:
        """How many processes this machine has."""
        return self._neighbours(self.size)

    def name(self, rank: int) -> str:
        """A rank as messages call it."""
        return f"rank {rank} on {self.members[rank].host} (process {self.members[rank].process})"

    def wait_alone(self, seconds: float) -> list[int]:
        """On rank 0, wait until all others have left; returns those that have not. Other ranks do not wait."""
        if self.memory is None or self.memory.wait_alone(self.rank, seconds):
            return []
        return [rank for rank in self.memory.staying() if rank != self.rank]

    def close(self) -> None:
        """End what rank 0 holds for the others."""
        if self.server is not None:
            self.server.close()

    def _neighbours(self, stop: int) -> int:
        """How many of the ranks before `stop` are on this machine."""
        return [member.machine for member in self.members[:stop]].count(self.members[self.rank].machine)
