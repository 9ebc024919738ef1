"""Lets every fault come over training and over process groups again and again, and prints how each of them ended.

    python tests/parallel/endurance.py --rounds 20 [--faults kill,SIGINT] [--jobs 2] [--turns] [--restarts 1]
    python3 tests/parallel/endurance.py --restarts 1 --rounds 16 --jobs 8 --seconds 560 [--first 17]

The faults and what is promised of their ends are those of the tests: `training_faults.py`, `group_faults.py`,
`start_faults.py` (fifty rounds have all fifty moments of a run); with
``--restarts 1`` those of `restart_faults.py`, over training that `caffepy launch --restarts 1` starts. The exit
status is 1 if anything was not as promised. Ctrl-C prints the table of what was tried so far; the last line is a
summary. Nothing has to be installed: packages may be found through PYTHONPATH, mpirun on the PATH.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import pytest  # noqa: E402
from fault_case import FaultCase  # noqa: E402
from group_faults import GROUP_FAULTS  # noqa: E402
from interrupts import default_interrupts  # noqa: E402
from restart_faults import RESTART_FAULTS  # noqa: E402
from start_faults import START_FAULTS  # noqa: E402
from subprocess_training import SubprocessTraining  # noqa: E402
from training_faults import TRAINING_FAULTS  # noqa: E402

CASES = [*TRAINING_FAULTS, *START_FAULTS, *GROUP_FAULTS]
_TAIL = 40
"""Lines of a failed round's log that are printed."""


@dataclass
class Record:
    """What became of a case.

    Args:
        case: which one.
        seconds: from fault to end, of the rounds that were as promised.
        failures: of each of the others its number and what was wrong.
        skipped: why it could not be tried.
    """

    case: FaultCase
    seconds: list[float] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    skipped: str = ""

    def row(self) -> str:
        """As the table shows it."""
        rounds = len(self.seconds) + len(self.failures)
        times = f"{max(self.seconds):7.2f} {median(self.seconds):7.2f}" if self.seconds else f"{'-':>7} {'-':>7}"
        return f"{self.case!s:<44} {rounds:6} {times} {len(self.failures):8}  {self.skipped}".rstrip()


def say(line: str) -> None:
    """Print at once, also into a file."""
    print(line, flush=True)


class Endurance:
    """Tries cases, some at a time.

    Args:
        records: of the cases.
        training: where.
        deadline: by `time.monotonic`; what would begin later is left out.
    """

    def __init__(self, records: Sequence[Record], training: SubprocessTraining, deadline: float) -> None:
        self.records = records
        self.left_out = 0
        """Trials for which there was no time."""
        self._training = training
        self._deadline = deadline

    def try_once(self, trial: tuple[int, Record]) -> None:
        """One round of a case."""
        number, record = trial
        if time.monotonic() > self._deadline:
            self.left_out += 1
            return
        try:
            record.seconds.append(record.case.check(self._training, number))
        except pytest.skip.Exception as reason:
            record.skipped = str(reason)
        except (Exception, pytest.fail.Exception) as error:
            record.failures.append((number, f"{type(error).__name__}: {error}"))
            say(f"{record.case}, round {number + 1}: {record.failures[-1][1].splitlines()[0][:300]}")

    def try_all(self, rounds: range, jobs: int, turns: bool) -> None:
        """All rounds, so many cases at a time; a round has every case once, or one of each kind. Ctrl-C ends it."""
        chosen = [in_turn(self.records, number) if turns else self.records for number in rounds]
        trials = [(number, record) for number, records in zip(rounds, chosen, strict=True) for record in records]
        begin = time.monotonic()
        masks = cores_of_jobs(sorted(os.sched_getaffinity(0)), jobs)
        with ThreadPoolExecutor(jobs, initializer=lambda: os.sched_setaffinity(0, masks.pop())) as pool:
            try:
                for (number, record), _ in zip(trials, pool.map(self.try_once, trials), strict=True):
                    if record is chosen[number - rounds.start][-1]:
                        failures = sum(len(record.failures) for record in self.records)
                        say(f"round {number + 1}: {time.monotonic() - begin:.0f} s, {failures} failures so far")
            except KeyboardInterrupt:
                say("interrupted: what runs comes to its end")
                pool.shutdown(cancel_futures=True)

    def summary(self) -> str:
        """All of it in a line."""
        seconds = [second for record in self.records for second in record.seconds]
        failures = sum(len(record.failures) for record in self.records)
        skipped = sum(bool(record.skipped) for record in self.records)
        parts = [f"{len(seconds) + failures} faults", f"{failures} not as promised"]
        parts += [f"at most {max(seconds):.1f} s from fault to end"] if seconds else []
        parts += [f"{skipped} cases could not be tried"] if skipped else []
        parts += [f"{self.left_out} left out for lack of time"] if self.left_out else []
        return ", ".join(parts)


def cores_of_jobs(cores: Sequence[int], jobs: int) -> list[set[int]]:
    """The cores of each job, at least two: a thread sets them for itself and so for what it starts."""
    width = min(max(len(cores) // jobs, 2), len(cores))
    return [{cores[(job * width + i) % len(cores)] for i in range(width)} for job in range(jobs)]


def in_turn(records: Sequence[Record], number: int) -> list[Record]:
    """One record of each kind, in every round that of another device."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.case.kind, []).append(record)
    return [alike[number % len(alike)] for alike in kinds.values()]


def choose(wanted: str, cases: Sequence[FaultCase]) -> list[FaultCase]:
    """Of some cases those whose kind is among those wanted.

    Raises:
        SystemExit: there is no such kind.
    """
    kinds = dict.fromkeys(case.kind for case in cases)
    names = [name.strip() for name in wanted.split(",")] if wanted else list(kinds)
    if unknown := [name for name in names if name not in kinds]:
        raise SystemExit(f"no such faults: {', '.join(unknown)}; there are: {', '.join(kinds)}")
    return [case for case in cases if case.kind in names]


def report(records: Sequence[Record]) -> None:
    """The table, and what the failed rounds had written last."""
    print(f"\n{'fault':<44} {'rounds':>6} {'worst s':>7} {'median':>7} {'failures':>8}")
    for record in records:
        print(record.row())
    for record in records:
        for number, text in record.failures:
            lines = text.splitlines()
            print(f"\n--- {record.case}, round {number + 1}: {lines[0]}")
            print("\n".join(lines[1:][-_TAIL:]))


def main() -> int:
    """Try, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often each fault comes (20)")
    parser.add_argument("--faults", default="", help="kinds of faults with commas between; all if left out")
    parser.add_argument("--first", type=int, default=1, help="number of the first round: they differ in when (1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time (1)")
    parser.add_argument("--turns", action="store_true", help="each round has one device of each kind, in turn")
    parser.add_argument("--restarts", type=int, choices=(0, 1), default=0, help="1: runs must end trained all the same")
    args = parser.parse_args()
    cases = choose(args.faults, RESTART_FAULTS if args.restarts else CASES)
    threads = max(1, (os.cpu_count() or 1) // (2 * args.jobs))
    deadline = time.monotonic() + args.seconds
    with default_interrupts(), tempfile.TemporaryDirectory(prefix="endurance") as folder:
        training = SubprocessTraining(Path(folder), threads)
        begin = time.monotonic()
        warm = training.train(iterations=26)  # compiles what all runs then load, instead of each of the first ones
        say(f"kernels are compiled: {time.monotonic() - begin:.0f} s, status {warm.status}")
        endurance = Endurance([Record(case) for case in cases], training, deadline)
        endurance.try_all(range(args.first - 1, args.first - 1 + args.rounds), args.jobs, args.turns)
    report(endurance.records)
    print(f"\nendurance, --restarts {args.restarts}: {endurance.summary()}")
    return int(any(record.failures for record in endurance.records))


if __name__ == "__main__":
    sys.exit(main())
