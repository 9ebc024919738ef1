"""Damages inputs of every format and sees that caffepy refuses or reads each of them: no exception that is none of its
own, no signal, no hang, no growth. From the repository's root:

    python tests/fuzz/run.py --count 200000 --jobs 2 --seed 1
    python tests/fuzz/run.py --only hostfile,image --count 5000
    python tests/fuzz/run.py --seed 1 --show "net prototxt:1234"

An input is determined by seed, format and number; each that fails is saved, with a text that says how.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fuzz.targets import TARGETS  # noqa: E402
from fuzz.worker import HANG_SECONDS, STATE, case_random  # noqa: E402

CHUNK = 250
"""Inputs that a worker is given at a time."""
KILL_SECONDS = 2 * HANG_SECONDS
"""Without a new input a worker is killed after so long: it hangs where no signal handler runs."""
SAVED = 5
"""Inputs saved of each kind of failure."""
COLUMNS = ("escape", "signal", "hang", "growth")

Chunk = tuple[int, int, int]


def say(line: str) -> None:
    """Print at once, also into a file."""
    print(line, flush=True)


@dataclass
class Tally:
    """What became of a format's inputs.

    Args:
        name: the format.
        inputs: how many were tried.
        seconds: what they took, of all workers together.
        failures: how many of each kind.
        found: how often each failure was seen, and its first number.
    """

    name: str
    inputs: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def row(self) -> str:
        """As the table shows it."""
        rate = self.inputs / self.seconds if self.seconds else 0.0
        return f"{self.name:<20} {self.inputs:8} {rate:8.0f} " + " ".join(f"{self.failures[k]:7}" for k in COLUMNS)


class Process:
    """One worker, started anew when an input has ended it."""

    def __init__(self, seed: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        work, state = self._folder / "work", self._folder / "state"
        work.mkdir()
        self._errors = self._folder / "stderr"
        state.write_bytes(STATE.pack(-1, -1))
        with open(state, "r+b") as file:
            self._state = mmap.mmap(file.fileno(), STATE.size)
        program = Path(__file__).with_name("worker.py")
        # one core each, so that what a rate says is a core's
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(seed), str(work), str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
            env=variables,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def trying(self) -> tuple[int, int]:
        """The input that is being tried: target and number."""
        index, number = STATE.unpack(self._state[: STATE.size])
        return index, number

    def give(self, chunk: Chunk) -> None:
        """Let it try these."""
        assert self._process.stdin is not None
        self._process.stdin.write("{} {} {}\n".format(*chunk))
        self._process.stdin.flush()

    def records(self) -> Iterator[dict[str, Any]]:
        """What it says until it is done; the last record says how it ended if it did."""
        since, before = time.monotonic(), self.trying
        while True:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                if self.trying != before:
                    since, before = time.monotonic(), self.trying
                elif time.monotonic() - since > KILL_SECONDS + (60 if before[0] < 0 else 0):
                    self._process.kill()
                    yield self._ended("hang", f"killed after {KILL_SECONDS} s")
                    return
                continue
            if not line:
                status = self._process.wait()
                yield self._ended("signal", f"signal {-status}" if status < 0 else f"status {status}")
                return
            record = json.loads(line)
            yield record
            if "done" in record or "ready" in record:
                return

    def _ended(self, kind: str, what: str) -> dict[str, Any]:
        index, number = self.trying
        where = self._errors.read_text(errors="replace")[-4000:]
        return {"target": index, "number": number, "kind": kind, "what": what, "where": where, "ended": True}

    @property
    def alive(self) -> bool:
        """Whether it can be given more."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and remove its files."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Run:
    """All inputs of a run, and what became of them.

    Args:
        chosen: indices of the targets.
        count: inputs in all.
        seed: of the run.
        output: where failing inputs are saved.
        seconds: after which no more inputs are begun.
    """

    def __init__(self, chosen: Sequence[int], count: int, seed: int, output: Path, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.tallies = {index: Tally(TARGETS[index].name) for index in chosen}  # type: ignore[attr-defined]
        self._seed = seed
        self._output = output
        self._lock = threading.Lock()
        self._chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        for chunk in plan_chunks(chosen, count):
            self._chunks.put(chunk)

    def work(self) -> None:
        """Let one worker try chunks until none is left; run by a thread for each."""
        process: Process | None = None
        while time.monotonic() < self._end:
            try:
                chunk = self._chunks.get_nowait()
            except queue.Empty:
                break
            while chunk[2] > 0:
                if process is None:
                    process = self._start()
                process, chunk = self._try(process, chunk)
        if process is not None:
            process.close()

    def _start(self) -> Process:
        process = Process(self._seed)
        for record in process.records():
            if "ready" not in record:
                raise RuntimeError(f"a worker cannot start: {record}; run tests/fuzz/worker.py to see why")
        return process

    def _try(self, process: Process, chunk: Chunk) -> tuple[Process | None, Chunk]:
        """Try a chunk; what is left of it if its worker has ended."""
        index, first, count = chunk
        start = time.monotonic()
        process.give(chunk)
        left = 0
        for record in process.records():
            if "kind" not in record:
                continue
            number = max(record["number"], first)
            self._note(index, number, record)
            if "ended" in record:
                left = first + count - number - 1
        with self._lock:
            self.tallies[index].inputs += count - left
            self.tallies[index].seconds += time.monotonic() - start
        if not left:
            return (process if process.alive else None), (index, first + count, 0)
        process.close()
        return None, (index, first + count - left, left)

    def _note(self, index: int, number: int, record: dict[str, Any]) -> None:
        tally = self.tallies[index]
        with self._lock:
            tally.failures[record["kind"]] += 1
            numbers = tally.found[record["kind"], record["what"]]
            numbers.append(number)
            if len(numbers) > SAVED:
                return
            say(f"{tally.name}:{number}: {record['kind']}: {record['what']}")
        stem = f"{tally.name.replace(' ', '_').replace('/', '_')}-{number}"
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / f"{stem}.txt").write_text(f"{record['kind']}: {record['what']}\n{record['where']}")
        (self._output / f"{stem}.input").write_bytes(made_elsewhere(tally.name, number, self._seed))


def made_elsewhere(name: str, number: int, seed: int) -> bytes:
    """An input, made by a process of its own, since making it may be what ends the process."""
    command = [sys.executable, __file__, "--seed", str(seed), "--show", f"{name}:{number}"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout


def make_input(index: int, number: int, seed: int) -> bytes:
    """The very input that a worker has tried."""
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[index](Path(folder))
        data: bytes = target.input(case_random(seed, target.name, number))
    return data


def plan_chunks(chosen: Sequence[int], count: int) -> list[Chunk]:
    """The inputs of all targets by their shares, the targets taking turns so that all are tried early."""
    shares = {index: TARGETS[index].share for index in chosen}  # type: ignore[attr-defined]
    total = sum(shares.values())
    chunks = []
    for index, share in shares.items():
        inputs = -(-count * share // total)
        chunks += [(index, first, min(CHUNK, inputs - first)) for first in range(0, inputs, CHUNK)]
    return sorted(chunks, key=lambda chunk: chunk[1] / shares[chunk[0]])


def find_targets(names: str) -> list[int]:
    """Indices of the targets whose names hold one of `names`, divided by commas; all if there is none."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    found = [i for i, kind in enumerate(TARGETS) if not wanted or any(w in kind.name.lower() for w in wanted)]  # type: ignore[attr-defined]
    if not found:
        raise SystemExit(f"no format is called {names}; there are {', '.join(kind.name for kind in TARGETS)}")  # type: ignore[attr-defined]
    return found


def show(case: str, seed: int) -> None:
    """Write one input to stdout."""
    name, _, number = case.rpartition(":")
    index = next(i for i, kind in enumerate(TARGETS) if kind.name == name)  # type: ignore[attr-defined]
    sys.stdout.buffer.write(make_input(index, int(number), seed))


def report(run: Run, seconds: float) -> int:
    """Print the table; how many inputs failed."""
    say(f"\n{'format':<20} {'inputs':>8} {'/s':>8} " + " ".join(f"{column:>7}" for column in COLUMNS))
    total = Tally("all", seconds=seconds)
    for tally in run.tallies.values():
        say(tally.row())
        total.inputs += tally.inputs
        total.failures.update(tally.failures)
    say(total.row())
    for tally in run.tallies.values():
        for (kind, what), numbers in sorted(tally.found.items(), key=lambda found: -len(found[1])):
            say(f"{len(numbers):6} x {tally.name}: {kind}: {what} (first: {min(numbers)})")
    return sum(total.failures.values())


def main() -> int:
    """Run, and end with status 1 if an input failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000, help="inputs in all (200000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers (the cores)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--only", default="", metavar="LIST", help="formats, or parts of their names, with commas")
    parser.add_argument("--output", type=Path, default=Path("fuzz-failures"), help="for failing inputs (fuzz-failures)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, however many were tried")
    parser.add_argument("--show", metavar="FORMAT:NUMBER", help="write one input to stdout and leave it at that")
    args = parser.parse_args()
    if args.show:
        show(args.show, args.seed)
        return 0
    run = Run(find_targets(args.only), args.count, args.seed, args.output, args.seconds)
    start = time.monotonic()
    threads = [threading.Thread(target=run.work) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = report(run, time.monotonic() - start)
    say(f"{failed} failed; see {args.output}" if failed else "none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
