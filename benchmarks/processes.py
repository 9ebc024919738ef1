"""Measurements in processes of their own, and how they time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LIMIT = 280
"""Seconds that one measurement may take."""
READY, TURN = "ready for turns", "milliseconds of a turn: "
"""How lines begin that a process prints when it waits for its first turn, and after each."""
LONG = 0.2
"""Seconds of a call from which a turn is one of them."""
PAUSE, WARMING = 0.05, 0.02
"""Seconds before a turn, in which the other side's idle threads stop looking for work (onnxruntime's hold a core for
about 20 ms), and of the calls that are then made unmeasured: caches and threads are this side's again."""


def measure_job(run: Callable[[int], Any], job: dict[str, Any]) -> float:
    """Median milliseconds of a call, as the job says: of `turns` rounds, each measured when a `Side` asks for it.

    With one thread of the CPU, a round's time is the processor's, which other programs disturb less.
    """
    if not job.get("turns"):
        return measure(run, job.get("quick", False))
    clock = time.process_time if job.get("threads") == 1 else time.perf_counter
    print(READY, flush=True)
    return statistics.median([_turn(run, clock) for _ in range(job["turns"])])


def measure(run: Callable[[int], Any], quick: bool = False) -> float:
    """Median milliseconds of a call over five groups of calls, three if `quick`.

    Args:
        run: makes so many calls and waits for them.
        quick: whether to take less time.
    """
    groups, seconds = (3, 0.08) if quick else (5, 0.4)
    run(1)
    count = max(1 if quick else 3, min(300, int(seconds / _seconds(run, 1))))
    return _milliseconds(run, groups, count)


def _turn(run: Callable[[int], Any], clock: Callable[[], float]) -> float:
    """Wait until it is asked for, then measure a round and print it."""
    sys.stdin.readline()
    time.sleep(PAUSE)
    one = _seconds(run, 1, clock)
    groups, count = (5, min(300, int(LONG / one))) if one < LONG else (1, 1)
    if one < WARMING:
        run(int(WARMING / one))
    milliseconds = _milliseconds(run, groups, count, clock)
    print(f"{TURN}{milliseconds}", flush=True)
    return milliseconds


def _milliseconds(
    run: Callable[[int], Any], groups: int, count: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median over groups of so many calls."""
    return statistics.median([_seconds(run, count, clock) for _ in range(groups)]) * 1e3


def _seconds(run: Callable[[int], Any], count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Of a call."""
    begin = clock()
    run(count)
    return (clock() - begin) / count


def narrow_vectors() -> None:
    """Let this process, and PyTorch in those that it starts, compute with AVX2 only; before numba is imported."""
    os.environ |= {"NUMBA_CPU_NAME": "haswell", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    os.environ |= {"OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    try:
        from llvmlite import binding
    except ModuleNotFoundError:  # the peer's interpreter
        return
    features = binding.get_host_cpu_features()
    features.update((name, False) for name in features if name.startswith("avx512"))
    binding.get_host_cpu_features = lambda: features


def repeated(call: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> Callable[[int], None]:
    """Makes so many calls and waits for them, for `measure`."""

    def run(count: int) -> None:
        for _ in range(count):
            call()
        wait()

    return run


@contextlib.contextmanager
def alone(lock: str, limit: int = LIMIT) -> Iterator[None]:
    """Hold a file's lock, so that one process at a time uses the device; the process ends after `limit` seconds of it.

    What comes before, imports and the net's description, may overlap with another's measurement.
    """
    with open(lock, "w") if lock else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(limit)
        try:
            yield
        finally:
            signal.alarm(0)


def in_a_process(
    command: Sequence[str], job: Any = None, limit: int = LIMIT, other_python: bool = False
) -> dict[str, Any] | str:
    """One measurement's result, the JSON on its last line, or what went wrong.

    Args:
        command: of the process.
        job: what it reads from its standard input, as JSON.
        limit: seconds until it is ended.
        other_python: the interpreter has modules of its own.
    """
    environment = dict(os.environ)
    if other_python:
        environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return "took too long"
    if done.returncode == -signal.SIGALRM:
        return "took too long"
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return (done.stderr or done.stdout)[-1500:].strip() or f"ended with {done.returncode}"
    if lines[:-1]:
        print("\n".join(lines[:-1]))
    found: dict[str, Any] = json.loads(lines[-1])
    return found


class Side:
    """A process that measures in turns with others; it waits for its turns without using a core.

    Args:
        command: of the process.
        job: what it reads from the first line of its standard input, as JSON; `turns` says how often it is asked.
        limit: seconds that it may take for an answer.
        other_python: the interpreter has modules of its own.
    """

    def __init__(self, command: Sequence[str], job: Any, limit: int, other_python: bool = False) -> None:
        environment = dict(os.environ)
        if other_python:
            environment.pop("PYTHONPATH", None)
        self._limit = limit
        self._said: deque[str] = deque(maxlen=20)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        self.rounds: list[float] = []
        self.error = ""
        self._say(json.dumps(job))
        self._answer(READY)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # why it has ended is seen in its answer
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _answer(self, beginning: str) -> str:
        """The next line that begins so; without one, `error` says what went wrong."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(beginning):
                    return line[len(beginning) :]
                self._said.append(line)
        finally:
            timer.cancel()
        self.error = "".join(self._said).strip() or f"ended with {self._process.wait()}"
        return ""

    def take_turn(self) -> None:
        """Measure a round."""
        if not self.error:
            self._say("")
            self.rounds += [float(milliseconds) for milliseconds in self._answer(TURN).split()]

    def finish(self) -> dict[str, Any] | str:
        """Its result with `rounds`, the milliseconds of each, or what went wrong; after the last turn."""
        last = "" if self.error else self._answer("{")
        return {**json.loads("{" + last), "rounds": self.rounds} if last else self.error

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
