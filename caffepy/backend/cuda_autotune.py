"""The choice among candidates: each is tried on the device once for a task, the fastest is kept and remembered.

Owns the clock, the memory that trying needs, and the file of decisions in the user's cache folder. Nothing is tried
while a stream is captured.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from caffepy.backend.base import Array
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_kernels import launch, launch_blocks, library_kernel
from caffepy.backend.cuda_memory import Scratch, allocate, flat, is_capturing
from caffepy.errors import DeviceError, RunError

if TYPE_CHECKING:
    from caffepy.backend.cuda_convolution import Candidate, Operands, Resources, Source, Task

logger = logging.getLogger(__name__)

VERSION = 1
"""To be raised when candidates change so that old decisions no longer hold."""

WAIT = 120.0
"""Seconds that a thread waits for another one that tries the same task, before it tries for itself."""

HOPELESS = 1.6
"""A candidate whose first timed run takes so many times the best one's time is not run again."""

PATIENCE = 1.0
"""Seconds that a candidate's very first run, with the loading of its kernel, may take."""

DELAY = 40_000
"""Nanoseconds of idling put before timed work for each run, so that its launches wait in line behind it."""

FINALISTS = 4
"""How many of the fastest candidates are timed once more."""


@dataclass(frozen=True)
class Decision:
    """What was found for a task.

    Args:
        name: the fastest candidate's; None if none can do it.
        microseconds: what it takes.
    """

    name: str | None
    microseconds: float


class Decisions:
    """Decisions of this process and of earlier ones, shared by all solver threads.

    Args:
        path: file that they are kept in; read once, written whenever there is a new one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._known = self._read()

    def get(self, key: str) -> Decision | None:
        """What was decided, if anything."""
        return self._known.get(key)

    def put(self, key: str, decision: Decision) -> None:
        """Remember; a file that cannot be written is no reason to stop."""
        with self._lock:
            self._known = {**self._read(), **self._known, key: decision}
            try:
                self._write()
            except OSError as error:
                logger.debug("%s: autotuning is not remembered: %s", self._path, error)

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Let one thread at a time look into a task, so that the others find its decision."""
        with self._lock:
            lock = self._turns.setdefault(key, threading.Lock())
        held = lock.acquire(timeout=WAIT)
        try:
            yield
        finally:
            if held:
                lock.release()

    def _read(self) -> dict[str, Decision]:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(key): Decision(_name(name), float(time)) for key, (name, time) in stored.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s: not a file of autotuning decisions, ignored: %s", self._path, error)
            return {}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        stored = {key: (d.name, round(d.microseconds, 2)) for key, d in sorted(self._known.items())}
        temporary.write_text(json.dumps(stored, indent=0), encoding="utf-8")
        os.replace(temporary, self._path)


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"a candidate's name is {value!r}")
    return value


def cache_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where decisions are kept: caffepy's folder in XDG_CACHE_HOME, or in ~/.cache."""
    home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "caffepy" / f"autotune-{VERSION}.json"


@cache
def decisions(path: Path) -> Decisions:
    """The decisions of a file, the same for all threads."""
    return Decisions(path)


class Tuner:
    """Chooses candidates for one backend.

    Args:
        enabled: whether candidates are tried; otherwise the first that can do a task is taken.
        device: the GPU's and the libraries' names and versions: what decisions depend on beside the task.
    """

    def __init__(self, enabled: bool, device: str) -> None:
        self._enabled = enabled
        self._device = device
        self._decisions = decisions(cache_file())

    def choose(
        self, task: Task, sources: Sequence[Source], operands: Operands | None, resources: Resources
    ) -> Candidate | None:
        """The candidate that carries out a task from now on; None if there is none."""
        if not self._enabled:
            return _first(sources)
        key = self._key(task, resources)
        with self._decisions.turn(key):
            known = self._decisions.get(key)
            if known is not None:
                found = None if known.name is None else _find(known.name, sources)
                if found is not None or known.name is None:
                    return found
            if is_capturing():
                return _first(sources)
            begin = monotonic()
            decision, chosen = self._try_all(task, sources, operands, resources)
            self._decisions.put(key, decision)
        took = monotonic() - begin
        logger.debug("%s: %s, %.1f us, found in %.2f s", key, decision.name, decision.microseconds, took)
        return chosen

    def time_of(self, task: Task, resources: Resources) -> float | None:
        """Microseconds that a task was found to take."""
        known = self._decisions.get(self._key(task, resources)) if self._enabled else None
        return None if known is None else known.microseconds

    def _key(self, task: Task, resources: Resources) -> str:
        p, g = task.problem, task.problem.geometry
        shapes = f"x {p.x} w {p.weights} stride {g.stride} pad {g.pad} dilation {g.dilation} group {g.group}"
        flags = "".join(f" {name}" for name in ("bias", "relu", "sums") if getattr(task, name))
        arithmetic = f"{p.storage}{' tf32' if resources.tf32 else ''}"
        return f"{self._device}; {arithmetic} {task.direction.value}{flags}; {shapes}"

    def _try_all(
        self, task: Task, sources: Sequence[Source], operands: Operands | None, resources: Resources
    ) -> tuple[Decision, Candidate | None]:
        """Time every candidate, the fastest ones twice."""
        lasting = resources.scratch
        resources.scratch = Scratch()
        try:
            tried = operands_for(task, operands)
            times = list(self._times(sources, tried))
            times.sort(key=lambda pair: pair[0])
            finals = [(measure(candidate, tried, time), candidate) for time, candidate in times[:FINALISTS]]
        finally:
            resources.scratch = lasting
        if not finals:
            return Decision(None, 0.0), None
        best, chosen = min(finals, key=lambda pair: pair[0])
        return Decision(chosen.name, best), chosen

    def _times(self, sources: Sequence[Source], operands: Operands) -> Iterator[tuple[float, Candidate]]:
        best = float("inf")
        for source in sources:
            if source.last_resort and best < float("inf"):
                continue
            for candidate in source.candidates():
                time = _attempt(candidate, operands, best)
                if time is not None:
                    best = min(best, time)
                    yield time, candidate


def _first(sources: Sequence[Source]) -> Candidate | None:
    for source in sources:
        for candidate in source.candidates():
            if candidate.prepare():
                return candidate
    return None


def _find(name: str, sources: Sequence[Source]) -> Candidate | None:
    for source in sources:
        if name.startswith(source.name):
            for candidate in source.candidates():
                if candidate.name == name and candidate.prepare():
                    return candidate
    return None


def _attempt(candidate: Candidate, operands: Operands, best: float) -> float | None:
    """Microseconds of a candidate; None if it fails or takes much longer than the best."""
    try:
        if not candidate.prepare():
            return None
        begin = monotonic()
        candidate.run(operands)
        cupy.cuda.get_current_stream().synchronize()
        if monotonic() - begin > PATIENCE and best < PATIENCE * 1e6:
            return None
        time = elapsed(lambda: candidate.run(operands), 1)
        if time > max(HOPELESS * best, best + 10):
            return None
        time = elapsed(lambda: candidate.run(operands), max(2, min(10, int(300 / time))))
        logger.debug("%s takes %.1f us", candidate.name, time)
        return time
    except (DeviceError, RunError, RuntimeError) as error:
        if isinstance(error, (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)):
            raise
        logger.debug("%s cannot be used: %s", candidate.name, error)
        return None


def elapsed(run: Callable[[], None], runs: int) -> float:
    """Microseconds of one of several runs that follow each other without a gap."""
    stream = cupy.cuda.get_current_stream()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    launch_blocks(library_kernel("tuning", "idle"), (1,), (1,), (DELAY * (runs + 1),))
    start.record(stream)
    for _ in range(runs):
        run()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / runs


def measure(candidate: Candidate, operands: Operands, about: float) -> float:
    """Microseconds of a candidate that takes about so many, with more care."""
    runs = max(2, min(20, int(1000 / max(about, 1.0))))
    return min(elapsed(lambda: candidate.run(operands), runs) for _ in range(3))


def operands_for(task: Task, given: Operands | None) -> Operands:
    """Arrays to try candidates on: those of the call, but for dweights, which others add to; else new ones."""
    from caffepy.backend.cuda_convolution import Direction, Operands

    problem = task.problem
    shapes = problem.arrays(task.direction)
    weights = task.direction is Direction.WEIGHTS
    out = allocate(shapes[2], "float32") if weights or given is None else given.out
    if weights and given is not None:
        return replace(given, out=out, accumulate=False)
    if given is not None:
        return given
    first, second = (noise(shape, problem.dtype) for shape in shapes[:2])
    outputs = problem.weights[0]
    return Operands(
        first, second, out if weights else allocate(shapes[2], problem.dtype),
        noise((outputs,), "float32") if task.bias else None,
        allocate((2, outputs)) if task.sums else None,
    )  # fmt: skip


def noise(shape: tuple[int, ...], dtype: str) -> Array:
    """An array of ordinary numbers: what a GPU multiplies has a say in how fast it does."""
    array = allocate(shape, dtype)
    name = {"float32": "noise_float", "float16": "noise_float16", "uint16": "noise_bfloat16"}[dtype]
    launch(library_kernel("tuning", name), array.size, (flat(array), array.size))
    return array
