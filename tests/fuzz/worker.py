"""A worker of the fuzzing program: tries inputs in this process, and reports one line of JSON for each failure.

It is told over stdin which inputs to try, a line each: target, first, count. The parent reads from a file which input
is being tried, so that it knows which one has ended this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

HANG_SECONDS = 60
"""Of the clock, so long that a busy machine does not pass for a hang; the processor's time has its own limit."""
GROWTH = 2**30
"""Bytes that memory may grow by in one input."""
SECONDS_PER_BYTE = 20e-6
"""A text of 1 MB is read in about a second; what takes 20 times as long takes no time in proportion to its size."""
ADDRESS_SPACE = 6 * 2**30
"""RLIMIT_AS: beyond it an allocation fails, instead of the machine."""
STATE = struct.Struct("<qq")
"""The target's and the input's number."""


class Hang(BaseException):
    """An input takes too long; no `except Exception` catches it."""


def case_random(seed: int, target: str, number: int) -> Random:
    """The random numbers of an input: the same in every run."""
    return Random(f"{seed}/{target}/{number}")


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_ours(error: Exception, allowed: tuple[type[Exception], ...]) -> bool:
    """Whether a user may see this error: one of the CaffepyError family, which no foreign one hides behind."""
    from caffepy.errors import CaffepyError, InternalError

    if isinstance(error, allowed):
        return True
    return isinstance(error, CaffepyError) and not isinstance(error, InternalError)


class Worker:
    """Tries inputs.

    Args:
        seed: of the run.
        folder: for files, this worker's own.
        state: where the present input's number is kept for the parent.
    """

    def __init__(self, seed: int, folder: Path, state: mmap.mmap) -> None:
        from fuzz.targets import TARGETS

        self._seed = seed
        self._folder = folder
        self._state = state
        self._kinds = TARGETS
        self._targets: dict[int, Any] = {}

    def run(self, index: int, first: int, count: int) -> None:
        """Try inputs of one target."""
        if index not in self._targets:
            folder = self._folder / str(index)
            folder.mkdir()
            os.chdir(folder)
            self._targets[index] = self._kinds[index](folder)
        target = self._targets[index]
        os.chdir(target.folder)
        for number in range(first, first + count):
            self._state[: STATE.size] = STATE.pack(index, number)
            failure = self._try(target, number)
            if failure is not None:
                say({"target": index, "number": number, **failure})
        self._state[: STATE.size] = STATE.pack(-1, -1)

    def _try(self, target: Any, number: int) -> dict[str, str] | None:
        data = target.input(case_random(self._seed, target.name, number))
        before, start = peak_bytes(), time.process_time()
        signal.alarm(HANG_SECONDS)
        try:
            target.use(data)
        except Hang:
            return {"kind": "hang", "what": f"over {HANG_SECONDS} s", "where": traceback.format_exc()}
        except Exception as error:
            if not is_ours(error, target.allowed):
                return {"kind": "escape", "what": describe(error), "where": traceback.format_exc()}
        finally:
            signal.alarm(0)
        seconds, grown = time.process_time() - start, peak_bytes() - before
        if grown > GROWTH:
            return {"kind": "growth", "what": f"{grown / 2**30:.1f} GiB", "where": f"{len(data)} bytes"}
        if seconds > target.seconds + len(data) * SECONDS_PER_BYTE:
            return {"kind": "growth", "what": "time", "where": f"{seconds:.1f} s for {len(data)} bytes"}
        return None


def describe(error: Exception) -> str:
    """Type and the innermost line of caffepy's, by which failures are told apart."""
    from caffepy.errors import InternalError

    if isinstance(error, InternalError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/caffepy/" in frame.filename]
    where = f" at {frames[-1].filename.rpartition('/caffepy/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}" if where else f"{type(error).__name__}: {str(error)[:160]!r}"


def say(record: dict[str, Any]) -> None:
    """One line to the parent."""
    print(json.dumps(record), file=_REPORT, flush=True)


def _hang(_: int, __: FrameType | None) -> None:
    raise Hang


_REPORT = sys.stdout


def main() -> None:
    """Serve the parent until it closes stdin."""
    seed, folder, state_path = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _hang)
    with open(state_path, "r+b") as file:
        state = mmap.mmap(file.fileno(), STATE.size)
    worker = Worker(seed, folder, state)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say({"ready": True})
    for line in sys.stdin:
        index, first, count = map(int, line.split())
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            worker.run(index, first, count)
        say({"done": True})


if __name__ == "__main__":
    main()
