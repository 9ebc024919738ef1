"""Who belongs to a process group, and what connects them besides the communicator."""

from __future__ import annotations

from dataclasses import dataclass

from caffepy.parallel.processes.world import World
from caffepy.parallel.store.records import Member
from caffepy.parallel.store.store import ControlChannel


@dataclass
class Membership:
    """This process's part in a group.

    Args:
        rank: its number.
        members: all processes, in the order of ranks.
        channel: their control channel.
        world: the processes as MPI knows them, where MPI started them.
    """

    rank: int
    members: list[Member]
    channel: ControlChannel
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
        return self.members[rank].name(rank)

    def _neighbours(self, stop: int) -> int:
        """How many of the ranks before `stop` are on this machine."""
        return [member.machine for member in self.members[:stop]].count(self.members[self.rank].machine)
