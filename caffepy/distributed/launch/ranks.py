"""The processes of a job on this machine: found by a variable of their environment.

A launcher's own ways with signals differ, and most end the ranks before they can write a snapshot. So a signal goes to
the ranks themselves; on other machines this module, started there as a program by the same launcher, sends it:

    python -m caffepy.distributed.launch.ranks SIGNAL MARK VARIABLE (one | all | every)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caffepy.utils.whole_numbers import whole

MARK = "CAFFEPY_LAUNCH"
"""The variable that all processes of one `caffepy launch` have, with a value that no other job has."""
_SELF = "caffepy.distributed.launch.ranks"


@dataclass(frozen=True)
class Process:
    """A process of the job.

    Args:
        pid: its number.
        parent: its parent's.
        rank: what the launcher has told it; None: it is none that a launcher numbers, such as the launcher itself.
        stopped: SIGSTOP or a debugger holds it, so that it handles no signal.
    """

    pid: int
    parent: int
    rank: int | None
    stopped: bool = False


def find_processes(mark: str, variable: str, system: Path = Path("/proc")) -> list[Process]:
    """The processes on this machine that have a mark, less this one and zombies, which have no environment.

    Args:
        mark: the value of `MARK`.
        variable: the one that tells a process its rank.
        system: where Linux shows its processes.
    """
    found = []
    for folder in system.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            environment = _environment((folder / "environ").read_bytes())
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):  # another user's, or it has just ended
            continue
        if environment.get(MARK) == mark:
            rank = environment.get(variable, "")
            found.append(Process(int(folder.name), int(parent), whole(rank), state in (b"T", b"t")))
    return found


def _environment(content: bytes) -> Mapping[str, str]:
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def ranks_among(processes: Iterable[Process]) -> list[Process]:
    """The ranks, the lowest first, without the processes that they have started, which inherit their variables."""
    numbered = {each.pid: each for each in processes if each.rank is not None}
    ranks = [each for each in numbered.values() if each.parent not in numbered]
    return sorted(ranks, key=lambda each: (each.rank, each.pid))


def send(number: int, mark: str, variable: str, whom: str) -> int:
    """Send a signal to processes of the job on this machine; returns how many got it.

    Args:
        number: the signal's.
        mark: as in `find_processes`.
        variable: as in `find_processes`.
        whom: ``one``: the lowest rank here that is not stopped, which is enough where ranks share what is asked of
            them; ``all`` ranks; ``every`` process of the job.
    """
    processes = find_processes(mark, variable)
    chosen = processes if whom == "every" else ranks_among(processes)
    if whom == "one":
        chosen = [process for process in chosen if not process.stopped][:1]
    sent = 0
    for process in chosen:
        try:
            os.kill(process.pid, number)
            sent += 1
        except OSError:  # it has just ended
            continue
    return sent


def sending_command(number: int, mark: str, variable: str, whom: str) -> list[str]:
    """The command line that does on another machine what `send` does here."""
    return [sys.executable, "-m", _SELF, str(number), mark, variable, whom]


def main(arguments: Sequence[str]) -> int:
    """Send; the status is 1 where ranks were meant and there are none."""
    number, mark, variable, whom = arguments
    sent = send(int(number), mark, variable, whom)
    return 0 if sent or whom == "every" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
