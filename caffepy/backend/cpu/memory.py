"""How much memory this process can still have: asked before what is large is allocated, since Linux says yes to all.

And what it has and does not use, which the C library keeps unless it is told to give it back.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def give_back_memory() -> None:
    """Give the system back what was freed but kept by the C library, where that is glibc; takes about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory(system: Path = Path("/proc"), group: Path = _GROUP) -> int | None:
    """Bytes that can be had without swapping or being killed; None where the system does not say.

    The least of what the machine has free, the control group's limit and RLIMIT_AS leave.
    """
    found = [*_machine(system), *_group(group), *_limit(system)]
    return max(min(found), 0) if found else None


def _machine(system: Path) -> Iterator[int]:
    try:
        lines = (system / "meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _group(group: Path) -> Iterator[int]:
    """What control group version 2 leaves; file pages that it holds could be given back."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield int(limit) - int(used) + int(kept.get("inactive_file", 0)) + int(kept.get("active_file", 0))
    except (OSError, ValueError):
        return


def _limit(system: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        pages = int((system / "self/statm").read_text().split()[0])
    except (OSError, ValueError):
        pages = 0
    yield limit - pages * resource.getpagesize()
