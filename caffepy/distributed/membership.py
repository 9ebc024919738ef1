"""Who belongs to a process group, what connects them besides the communicator, and for whom a rank waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.errors import PeerError
from caffepy.parallel.processes.world import World
from caffepy.parallel.store.records import DeviceStatus, Member
from caffepy.parallel.store.store import ControlChannel

_SILENT_SECONDS = 5.0
"""A rank that has said nothing for so long is stopped, or its network is."""


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

    def find_gone(self, begun: int, waits_for: Sequence[int]) -> str:
        """The ranks that have left and will not join an operation; empty if there are none, or it cannot be known.

        Args:
            begun: how many collectives this rank has begun.
            waits_for: the ranks that the operation waits for; empty: all.
        """
        try:
            statuses = self.channel.statuses()
        except PeerError:  # the monitor reports this
            return ""
        gone = [
            each.rank
            for each in statuses
            if each.left and (each.rank in waits_for or (not waits_for and each.collectives < begun))
        ]
        return ", ".join(f"{self.name(rank)}, which has left the group" for rank in gone)

    def find_stragglers(self, begun: int, what: str, waits_for: Sequence[int]) -> str:
        """The ranks that an operation waits for, with what they do instead; empty if nobody can be blamed.

        Args:
            begun: how many collectives this rank has begun.
            what: it waits in, as its heartbeat says.
            waits_for: the ranks that are known to be missing.

        Raises:
            PeerError: rank 0, which would know, is gone itself.
        """
        known = {each.rank: each for each in self.channel.statuses()}
        others = [known.get(rank, DeviceStatus(rank)) for rank in range(self.size) if rank != self.rank]
        behind = [each for each in others if each.collectives < begun]
        missing = [each for each in others if each.rank in waits_for]
        # Where one is behind, the pieces of the others are only waited for because it comes before them.
        late = [each for each in missing if each in behind] or missing or behind
        late = late or [each for each in others if each.waiting not in ("", what)]
        return ", ".join(f"{self.name(each.rank)}, {_doing(each, begun)}" for each in late)

    def _neighbours(self, stop: int) -> int:
        """How many of the ranks before `stop` are on this machine."""
        return [member.machine for member in self.members[:stop]].count(self.members[self.rank].machine)


def _doing(status: DeviceStatus, begun: int) -> str:
    if status.left:
        return "which has left the group"
    if status.silent > _SILENT_SECONDS:
        return f"which has not been heard of for {status.silent:.0f} s"
    doing = f"waits in '{status.waiting}'" if status.waiting else "waits for nobody"
    return f"which has begun {status.collectives} of {begun} collectives and {doing}"
