"""Whether a job that has failed is started again: how often, after how long, on how many hosts."""

from __future__ import annotations

import re

from caffepy.parallel.launch.supervisor import Ending

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_DOUBLINGS = 6
"""After so many the delay is the longest."""
_USERS_MISTAKE = 2
_INTERRUPTED = 130
_VARYING = re.compile(r" ?\(?process \d+\)?|\d+(\.\d+)? s\b|0x[0-9a-f]+")
"""What differs in messages of one and the same failure: process numbers, seconds, addresses."""


class Restarts:
    """Counts the starts of a job.

    Args:
        allowed: how often it may be started again.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.made = 0
        """How often it was started again."""
        self._before = ""

    def refusal(self, ending: Ending) -> str | None:
        """Why a job that ended so is not started again, empty where there is nothing to say; None: it is.

        To be asked once for each end.
        """
        before, self._before = self._before, failure_way(ending)
        if ending.status == 0 or ending.stopped or not self.allowed:
            return ""
        if ending.status == _USERS_MISTAKE:
            return "another start would meet the same mistake"
        if ending.status == _INTERRUPTED:
            return "it was interrupted"
        if before and before == self._before:
            return f"it failed twice in the same way ({ending.error})"
        if self.made == self.allowed:
            return f"it was started again {self.made} times already (--restarts {self.allowed})"
        return None

    def next_delay(self) -> float:
        """Count another start; returns the seconds to wait before it: 1, 2, 4, … and at most 60."""
        delay = min(_FIRST_SECONDS * 2.0 ** min(self.made, _DOUBLINGS), _LONGEST_SECONDS)
        self.made += 1
        return delay


def failure_way(ending: Ending) -> str:
    """What two failures have in common that are the same: the message, which names rank and iteration, less numbers
    that vary. Empty where nobody said anything: such failures count as different."""
    return _VARYING.sub("", ending.error)


def usable_nodes(left: int, least: int, per_node: int, ranks: int, passes: int) -> int | None:
    """The most hosts, of those left, over which the global batch can be divided; None: fewer than `least` could.

    A rank makes `passes` of its batch in an iteration, ``iter_size``. Fewer ranks make more: their number, times
    iter_size, must be a divisor's of ``ranks * passes``.

    Args:
        left: hosts that can be used.
        least: of them that must be.
        per_node: ranks a host.
        ranks: in all, before.
        passes: iter_size; 0: the program has no batch to keep.
    """
    for nodes in range(left, least - 1, -1):
        if nodes > 0 and (passes == 0 or ranks * passes % (nodes * per_node) == 0):
            return nodes
    return None
