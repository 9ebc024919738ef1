"""For whom a rank waits, as far as it can be known: from the operation itself, or from the others' heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.distributed.membership import Membership
from caffepy.errors import PeerError
from caffepy.parallel.communicators.collectives import Collective
from caffepy.parallel.store.records import DeviceStatus

_SILENT_SECONDS = 5.0
"""A rank that has said nothing for so long is stopped, or its network is."""


def find_gone(membership: Membership, begun: int, waits_for: Sequence[int]) -> str:
    """The ranks that have left and will not join an operation; empty if there are none, or it cannot be known.

    Args:
        membership: the group's.
        begun: how many collectives this rank has begun.
        waits_for: the ranks that the operation waits for; empty: all.
    """
    try:
        statuses = membership.channel.statuses()
    except PeerError:  # the monitor reports this
        return ""
    gone = [
        each.rank
        for each in statuses
        if each.left and (each.rank in waits_for or (not waits_for and each.collectives < begun))
    ]
    return ", ".join(f"{membership.name(rank)}, which has left the group" for rank in gone)


def find_stragglers(membership: Membership, begun: int, collective: Collective, waits_for: Sequence[int]) -> str:
    """The ranks that an operation waits for, with what they do instead; empty if nobody can be blamed.

    Args:
        membership: the group's.
        begun: how many collectives this rank has begun.
        collective: what it waits in.
        waits_for: the ranks that are known to be missing.

    Raises:
        PeerError: rank 0, which would know, is gone itself.
    """
    known = {each.rank: each for each in membership.channel.statuses()}
    others = [known.get(rank, DeviceStatus(rank)) for rank in range(membership.size) if rank != membership.rank]
    behind = [each for each in others if each.collectives < begun]
    missing = [each for each in others if each.rank in waits_for]
    # Where one is behind, the pieces of the others are only waited for because it comes before them.
    late = [each for each in missing if each in behind] or missing or behind
    if not late:
        elsewhere = ("", collective.describe(membership.size))
        late = [each for each in others if each.waiting not in elsewhere]
    return ", ".join(f"{membership.name(each.rank)}, {_doing(each, begun)}" for each in late)


def _doing(status: DeviceStatus, begun: int) -> str:
    if status.left:
        return "which has left the group"
    if status.silent > _SILENT_SECONDS:
        return f"which has not been heard of for {status.silent:.0f} s"
    doing = f"waits in '{status.waiting}'" if status.waiting else "waits for nobody"
    return f"which has begun {status.collectives} of {begun} collectives and {doing}"
