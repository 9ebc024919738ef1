"""Lets every fault come over training and over process groups again and again, and prints how each of them ended.

    python tests/parallel/endurance.py --rounds 20 [--faults kill,SIGINT] [--jobs 2] [--turns] [--restarts 1]

The faults and what is promised of their ends are those of the tests: `training_faults.py`, `group_faults.py`; with
``--restarts 1`` those of `restart_faults.py`, over training that `caffepy launch --restarts 1` starts. The exit
status is 1 if anything was not as promised. Ctrl-C prints the table of what was tried so far.
"""

from __future__ import annotations

import argparse
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
from laboratory import Laboratory  # noqa: E402
from processes import default_interrupts  # noqa: E402
from restart_faults import RESTART_FAULTS  # noqa: E402
from training_faults import TRAINING_FAULTS  # noqa: E402

CASES = [*TRAINING_FAULTS, *GROUP_FAULTS]
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


def try_once(record: Record, laboratory: Laboratory, number: int) -> None:
    """One round of a case."""
    try:
        record.seconds.append(record.case.check(laboratory, number))
    except pytest.skip.Exception as reason:
        record.skipped = str(reason)
    except (Exception, pytest.fail.Exception) as error:
        record.failures.append((number, f"{type(error).__name__}: {error}"))
        say(f"{record.case}, round {number + 1}: {record.failures[-1][1].splitlines()[0][:300]}")


def in_turn(records: Sequence[Record], number: int) -> list[Record]:
    """One record of each kind, in every round that of another place."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.case.kind, []).append(record)
    return [places[number % len(places)] for places in kinds.values()]


def try_all(cases: Sequence[FaultCase], rounds: int, jobs: int, turns: bool) -> list[Record]:
    """All rounds, so many cases at a time; a round has every case once, or one of each kind. Ctrl-C ends it early."""
    records = [Record(case) for case in cases]
    with tempfile.TemporaryDirectory(prefix="endurance") as folder, ThreadPoolExecutor(jobs) as pool:
        laboratory = Laboratory(Path(folder))
        try:
            for number in range(rounds):
                begin = time.monotonic()
                chosen = in_turn(records, number) if turns else records
                list(pool.map(lambda record, number=number: try_once(record, laboratory, number), chosen))
                failures = sum(len(record.failures) for record in records)
                say(f"round {number + 1} of {rounds}: {time.monotonic() - begin:.0f} s, {failures} failures so far")
        except KeyboardInterrupt:
            say("interrupted: what runs comes to its end")
            pool.shutdown(cancel_futures=True)
    return records


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
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at a time (1)")
    parser.add_argument("--turns", action="store_true", help="each round has one place of each kind, in turn")
    parser.add_argument("--restarts", type=int, choices=(0, 1), default=0, help="1: runs must end trained all the same")
    args = parser.parse_args()
    cases = RESTART_FAULTS if args.restarts else CASES
    with default_interrupts():
        records = try_all(choose(args.faults, cases), args.rounds, args.jobs, args.turns)
    report(records)
    return int(any(record.failures for record in records))


if __name__ == "__main__":
    sys.exit(main())
