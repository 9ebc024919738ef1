"""For whom a rank waits, as far as it can be known: from the operation itself, or from what the others say they do."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.distributed.membership import Membership
from caffepy.errors import PeerError
from caffepy.parallel.communicators.collectives import Operation
from caffepy.parallel.store.store import State

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
        states = membership.store.states()
    except PeerError:  # the monitor reports this
        return ""
    gone = [
        rank
        for rank, state in sorted(states.items())
        if state.left and (rank in waits_for or (not waits_for and state.collectives < begun))
    ]
    return ", ".join(f"{membership.name(rank)}, which has left the group" for rank in gone)


def find_culprits(membership: Membership, begun: int, operation: Operation, waits_for: Sequence[int]) -> str:
    """The ranks that an operation waits for, with what they do instead; empty if nobody can be blamed.

    Args:
        membership: the group's.
        begun: how many collectives this rank has begun.
        operation: what it waits in.
        waits_for: the ranks that are known to be missing.

    Raises:
        PeerError: rank 0, which would know, is gone itself.
    """
    states = membership.store.states()
    others = [rank for rank in range(membership.size) if rank != membership.rank]
    behind = [rank for rank in others if states.get(rank, State()).collectives < begun]
    # Where one is behind, the pieces of the others are only waited for because it comes before them.
    late = [rank for rank in waits_for if rank in behind] or list(waits_for) or behind
    if not late:
        elsewhere = ("", operation.describe(membership.size))
        late = [rank for rank in others if states.get(rank, State()).waiting not in elsewhere]
    return ", ".join(f"{membership.name(rank)}, {_doing(states.get(rank, State()), begun)}" for rank in sorted(late))


def _doing(state: State, begun: int) -> str:
    if state.left:
        return "which has left the group"
    if state.seconds > _SILENT_SECONDS:
        return f"which has not been heard of for {state.seconds:.0f} s"
    doing = f"waits in '{state.waiting}'" if state.waiting else "waits for nobody"
    return f"which has begun {state.collectives} of {begun} collectives and {doing}"
