"""Compiles the kernels that a net will need before it needs them, in processes of their own.

Numba compiles under one lock, so that threads gain nothing. The first kernel that is not in the cache starts a
rehearsal: the net runs with `recorded_entries`, where kernels are noted instead of run. The rest is a queue, of which
worker processes (`python -m caffepy.backend.cpu.jit.ahead`) and this one each take the next; what a worker compiled
comes from the cache. Where a worker cannot be had or fails, this process compiles everything itself.

CAFFEPY_COMPILE_WORKERS is the number of workers; 0: none.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from caffepy.backend.cpu.jit.cache import kernels_folder

logger = logging.getLogger(__name__)

WORKERS = "CAFFEPY_COMPILE_WORKERS"
"""The variable that says how many processes compile."""
_MOST_WORKERS = 8
_MOST_REHEARSALS = 8
_LIMIT = 60.0
"""Seconds that a thread waits for a kernel in a worker before it compiles it itself."""
_CACHED = re.compile(r"\.(\w+)-\d+\.")
"""A kernel's name in the names of its files."""


class Compiled(Protocol):
    """A kernel; see `Entry` in kernel.py."""

    name: str

    @property
    def recipe(self) -> dict[str, Any] | None:
        """How another process finds it; None where it cannot."""

    @property
    def address(self) -> int:
        """Of the machine code; compiles it or loads it from the cache."""


class _Recording(threading.local):
    entries: list[Any] | None = None


recording = _Recording()
"""Where this thread's kernels are noted instead of run, if they are."""


@contextmanager
def recorded_entries() -> Iterator[list[Any]]:
    """Within a `with` block, this thread's kernels are noted and do nothing."""
    before, recording.entries = recording.entries, []
    try:
        yield recording.entries
    finally:
        recording.entries = before


def worker_count(environment: dict[str, str] | None = None) -> int:
    """How many processes to compile in: one less than this process may use CPUs."""
    given = (os.environ if environment is None else environment).get(WORKERS, "")
    if given.isdecimal():
        return min(int(given), _MOST_WORKERS)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus - 1, _MOST_WORKERS)


class CompileAhead:
    """The kernels that are to be compiled in this process's workers.

    Args:
        workers: how many there may be.
    """

    def __init__(self, workers: Callable[[], int] = worker_count) -> None:
        self._workers = workers
        self._rehearsals: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._queue: dict[str, Compiled] = {}
        self._in_flight: set[str] = set()
        self._cached: set[str] | None = None
        self._total = 0

    def expect(self, rehearse: Callable[[], None]) -> None:
        """Have `rehearse`, which runs a net, called when the first kernel is missing."""
        with self._changed:
            self._rehearsals = [*self._rehearsals[1 - _MOST_REHEARSALS :], rehearse]

    def total(self) -> int:
        """How many kernels were queued so far, for the log."""
        return self._total

    def wait_for(self, entry: Compiled) -> None:
        """Return when it is the caller's turn to compile a kernel, or when a worker has put it into the cache."""
        with self._changed:
            rehearsals, self._rehearsals = self._rehearsals if self._is_missing(entry) else [], []
        if rehearsals:
            self._rehearse(rehearsals, entry)
        with self._changed:
            self._queue.pop(entry.name, None)
        while entry.name in self._in_flight:
            other = self._take(in_worker=False)
            if other is not None:
                _ = other.address
                continue
            with self._changed:
                if not self._changed.wait_for(lambda: entry.name not in self._in_flight, _LIMIT):
                    self._in_flight.discard(entry.name)

    def _is_missing(self, entry: Compiled) -> bool:
        """Whether the cache does not have it; looked up only while there is something to rehearse."""
        if not self._rehearsals or kernels_folder() is None or self._workers() < 1:
            return False
        if self._cached is None:
            self._cached = _cached_names()
        return entry.name not in self._cached

    def _rehearse(self, rehearsals: Sequence[Callable[[], None]], first: Compiled) -> None:
        with recorded_entries() as entries:
            for rehearse in rehearsals:
                try:
                    rehearse()
                except Exception as error:  # what is wrong with the net is said when it runs
                    logger.debug("the kernels of a net cannot be foreseen: %r", error)
        known = self._cached or set()
        missing = {entry.name: entry for entry in entries if entry.name not in known and entry.name != first.name}
        with self._changed:
            self._queue.update({name: entry for name, entry in missing.items() if entry.recipe is not None})
            self._total += len(missing) + 1
            count = min(self._workers(), len(self._queue))
        logger.debug("%d CPU kernels are to be compiled, in %d more processes", self._total, count)
        for number in range(count):
            threading.Thread(target=self._serve, name=f"compile {number}", daemon=True).start()

    def _take(self, in_worker: bool) -> Compiled | None:
        """The next kernel, None if all are taken."""
        with self._changed:
            if not self._queue:
                return None
            name = next(iter(self._queue))
            if in_worker:
                self._in_flight.add(name)
            return self._queue.pop(name)

    def _serve(self) -> None:
        """Have a worker compile until nothing is left."""
        try:
            worker = _Worker()
        except OSError as error:
            logger.debug("no process to compile in: %s", error)
            return
        with worker:
            while (entry := self._take(in_worker=True)) is not None:
                alive = worker.compile(entry)
                with self._changed:
                    self._in_flight.discard(entry.name)
                    self._changed.notify_all()
                if not alive:
                    return


class _Worker:
    """A process that compiles; it ends when its input is closed, so also when this process ends."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def compile(self, entry: Compiled) -> bool:
        """Wait until a kernel is in the cache; False if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(entry.recipe).encode() + b"\n")
            self._process.stdin.flush()
            return bool(self._process.stdout.readline())
        except OSError:
            return False


def _cached_names() -> set[str]:
    folder = kernels_folder()
    try:
        files = os.listdir(folder) if folder is not None else []
    except OSError:
        return set()
    return {found[1] for file in files if (found := _CACHED.search(file))}


def entry_of(recipe: dict[str, Any]) -> Any:
    """The kernel of a recipe: `module`.`name`, called with the formula `module`.`name` and more arguments if given."""
    found = getattr(importlib.import_module(recipe["module"]), recipe["name"])
    if "formula" not in recipe:
        return found
    module, name = recipe["formula"]
    arguments = (tuple(argument) for argument in recipe["arguments"])
    return found(getattr(importlib.import_module(module), name), *arguments)


def main() -> None:
    """Compile the kernels whose recipes come as lines; answer each with a line."""
    os.environ[WORKERS] = "0"
    for line in sys.stdin:
        try:
            _ = entry_of(json.loads(line)).address
        except Exception as error:  # the process that wants it finds the reason when it compiles it itself
            logger.debug("not compiled: %r", error)
        sys.stdout.write("done\n")
        sys.stdout.flush()


AHEAD = CompileAhead()
"""This process's."""

if __name__ == "__main__":
    main()
