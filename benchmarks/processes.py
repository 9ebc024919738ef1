"""Measurements in processes of their own, and how they time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LIMIT = 280
"""Seconds that one measurement may take."""


def measure(run: Callable[[int], Any], quick: bool = False) -> float:
    """Median milliseconds of a call over five groups of calls, three if `quick`.

    Args:
        run: makes so many calls and waits for them.
        quick: whether to take less time.
    """
    groups, seconds = (3, 0.08) if quick else (5, 0.4)
    run(1)
    begin = time.perf_counter()
    run(1)
    count = max(1 if quick else 3, min(300, int(seconds / (time.perf_counter() - begin))))
    times = []
    for _ in range(groups):
        begin = time.perf_counter()
        run(count)
        times.append((time.perf_counter() - begin) / count * 1e3)
    return statistics.median(times)


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
