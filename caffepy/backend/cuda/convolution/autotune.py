"""Autotuning: time each candidate of a task on the device once, and cache the fastest correct one.

Nothing is timed during stream capture. `Stopwatch` times runs without the gaps of host launches: the device first idles
for the expected launch overhead, that is the first launch plus the excess of each further launch over a run. The
recorded launch times then show whether a launch came too late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic, monotonic_ns

from caffepy.backend.cuda.compiler import c_type, launch, launch_blocks, library_kernel, log_first_use
from caffepy.backend.cuda.convolution.algorithm import AlgorithmFamily, Candidate, KeepingCandidate, Operands, Resources
from caffepy.backend.cuda.convolution.cache import Decision, cache_file, decisions
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import Scratch, allocate, copy, flat, is_capturing, raw
from caffepy.backend.types import Array
from caffepy.errors import DeviceError, OutOfMemoryError, RunError

logger = logging.getLogger(__name__)


FIRST_LAUNCH = 60_000
"""Assumed nanoseconds to launch the first run, which includes an event, before it is measured."""

LAUNCH = 40_000
"""Assumed nanoseconds to launch each further run."""

MARGIN = 20_000
"""Additional idle nanoseconds, because launch times vary."""

LONGEST_IDLING = 20_000_000
"""Maximum idle nanoseconds, in case the host was delayed."""

MAX_TRIES = 3
"""Maximum repetitions of a timing while the host is delayed."""


class Stopwatch:
    """Times the runs of one candidate and learns its launch overhead.

    Args:
        run: launches one run.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._first = FIRST_LAUNCH
        self._launch = LAUNCH

    def elapsed(self, runs: int, about: float = 0.0) -> float:
        """Return the microseconds per run of consecutive runs without gaps.

        If a launch was late, the runs are timed again after a longer idle period.

        Args:
            runs: number of runs.
            about: expected microseconds of a run, if known.
        """
        # The device idles while the host launches all runs; then they follow each other without gaps, and their own
        # time is measured.
        wait = self._first + MARGIN + (runs - 1) * max(0, self._launch - int(about * 1e3))
        for _ in range(MAX_TRIES):
            wait = min(wait, LONGEST_IDLING)
            time, launched = _timed(self._run, runs, wait)
            late = lateness(launched, wait, time)
            if late <= 0:
                break
            # The host was late, by a thread of another GPU or the system: the device ran dry, and the time includes the
            # gap.
            wait += 2 * late + MARGIN
        self._first = launched[0]
        self._launch = (launched[-1] - launched[0]) // (runs - 1) if runs > 1 else launched[0]
        return time


def lateness(launched: Sequence[int], wait: int, time: float) -> int:
    """Return by how many nanoseconds the latest launch came after the device could have started it."""
    return max(moment - wait - int(number * time * 1e3) for number, moment in enumerate(launched))


def _timed(run: Callable[[], None], runs: int, wait: int) -> tuple[float, list[int]]:
    """Return microseconds per run, and each launch's completion in nanoseconds since the idle kernel's launch."""
    stream = cupy.cuda.get_current_stream()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    idle = library_kernel("tuning", "idle")
    begin = monotonic_ns()
    launch_blocks(idle, (1,), (1,), (wait,))
    start.record(stream)
    launched = []
    for _ in range(runs):
        run()
        launched.append(monotonic_ns() - begin)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3 / runs, launched


PRUNE_RATIO = 1.25
"""A candidate is dropped if its first timed run exceeds the best time by this factor."""

RESOLUTION = 4.0
"""Microseconds above the best time that one timed run cannot resolve."""

FIRST_RUN_RATIO = 3.0
"""A candidate is dropped if its first, untimed run exceeds the best time by this factor."""

HOST_DELAY = 20_000.0
"""Additional microseconds by which other threads (of several GPUs) may delay the host's detection that the first run
has ended."""

REPEAT_RATIO = 2.0
"""A single time up to this factor of the best time may be disturbed; the run is repeated."""

TIMING_BUDGET = 300.0
"""Microseconds of runs per timing, with 2 to 10 runs."""

FINALISTS = 4
"""Maximum number of finalists, which are timed again."""

MIN_FINALISTS = 2
"""Minimum number of finalists, so that one disturbed timing does not decide."""

FINALIST_RATIO = 1.05
"""Further finalists must be within this factor of the fastest time."""

ROUNDS = 3
"""Rounds in which the finalists are timed in turn; the shortest time counts."""

TOLERANCE = 0.02
"""Maximum difference of two candidates' results relative to the largest: several roundings to eight bits."""

SMALLEST_STEP = 2.0**-23
"""Additional absolute tolerance: float16 numbers near zero are 2^-24 apart."""


PATIENCE, CLOSE = 4, 1.05
"""A family ends after this number of candidates in a row that take longer than this ratio of the best time: the likely
fastest come first. For eight nets on an H200 this leaves out a fifth to a third of the runs; the convolutions that are
chosen take 0.00 to 0.27 % longer."""

PROGRESS_SECONDS = 5.0
"""Seconds between two lines about a tuning that takes long."""


class Autotuner:
    """Times candidates and keeps the fastest, for one backend.

    Args:
        enabled: whether to time candidates; otherwise the first that supports a task is used.
        device: names and versions of the GPU and the libraries, part of the cache key.
    """

    def __init__(self, enabled: bool, device: str) -> None:
        self.enabled = enabled
        self._device = device
        self._decisions = decisions(cache_file())
        self._timed = 0
        self._told = monotonic()

    def will_time(self, task: Task, resources: Resources) -> bool:
        known = not self.enabled or self._decisions.get(self._key(task, resources)) is not None
        return not known and not is_capturing()

    def choose(
        self, task: Task, families: Sequence[AlgorithmFamily], operands: Operands | None, resources: Resources
    ) -> Candidate | None:
        """Return the candidate for a task from now on, or None."""
        if not self.enabled:
            return first_trusted(families)
        key = self._key(task, resources)
        with self._decisions.turn(key):
            known = self._decisions.get(key)
            if known is not None:
                # A new release of a library may not have the plan any more; then the task is tuned again.
                cached = _find(known.name, families)
                if cached is not None:
                    return cached
            # Timing synchronises, which a capture forbids. The eager pass before it has normally tuned all tasks.
            if is_capturing():
                return first_trusted(families)
            begin = monotonic()
            log_first_use()
            chosen, microseconds, certain = _try_all(task, families, operands, resources)
            if chosen is not None:
                # If candidates could not be checked, cache in this process only: another choice would change the bits.
                lasting = certain or resources.deterministic
                unavailable = None if known is None else known.name
                kept = self._decisions.put(key, Decision(chosen.name, microseconds), unavailable, lasting)
                if chosen.name == kept.name:
                    _keep(chosen)
                chosen = _find(kept.name, families) or chosen  # a new object, without the plans that were not chosen
            self._tell_progress()
        name = "nothing" if chosen is None else chosen.name
        logger.debug("%s: %s, %.1f us, chosen in %.2f s", key, name, microseconds, monotonic() - begin)
        return chosen

    def _tell_progress(self) -> None:
        self._timed += 1
        if monotonic() - self._told > PROGRESS_SECONDS:
            self._told = monotonic()
            logger.info("Tuning convolutions: %d passes timed so far", self._timed)

    def _key(self, task: Task, resources: Resources) -> str:
        p, g = task.problem, task.problem.geometry
        shapes = f"x {p.x} w {p.weights} stride {g.stride} pad {g.pad} dilation {g.dilation} group {g.group}"
        flags = "".join(f" {name}" for name in ("bias", "relu", "sums", "residual") if getattr(task, name))
        arithmetic = f"{p.dtype}{' tf32' if resources.tf32 else ''}"
        return f"{self._device}; {arithmetic} {task.direction.value}{flags}; {shapes}"


def first_trusted(families: Sequence[AlgorithmFamily]) -> Candidate | None:
    """Return the first candidate that supports the task and whose result needs no check."""
    for family in families:
        for candidate in () if family.checked else family.candidates():
            if candidate.prepare():
                return candidate
    return None


def _find(name: str, families: Sequence[AlgorithmFamily]) -> Candidate | None:
    """Return the candidate of this name, or None if it no longer exists."""
    for family in families:
        if name.startswith(family.name):
            for candidate in _named(name, family):
                if candidate.prepare():
                    _keep(candidate)
                    return candidate
    return None


def _named(name: str, family: AlgorithmFamily) -> Iterator[Candidate]:
    """Yield the candidate of a name: from the plan cache, then newly built if that fails."""
    if family.kept is not None:
        yield from family.kept(name)
    yield from (candidate for candidate in family.candidates() if candidate.name == name)


def _keep(candidate: Candidate) -> None:
    """Store a prepared candidate's plan for later processes."""
    if isinstance(candidate, KeepingCandidate):
        candidate.keep()


def _try_all(
    task: Task, families: Sequence[AlgorithmFamily], operands: Operands | None, resources: Resources
) -> tuple[Candidate | None, float, bool]:
    """Return the fastest candidate, its microseconds, and whether all faster candidates could be checked."""
    # Candidates that lose may take large workspaces; these go with the trial.
    lasting = resources.scratch
    resources.scratch = Scratch()
    try:
        trial = Trial(operands_for(task, operands), lambda: operands_for(task, None))
        # Trusted families first: the results of the others are compared with theirs.
        for family in sorted(families, key=lambda family: family.checked):
            trial.add(family)
        return *trial.best(), trial.certain
    finally:
        resources.scratch = lasting


@dataclass(eq=False)
class Contender:
    """A candidate that supports the task.

    Args:
        candidate: prepared.
        microseconds: its time.
        watch: times it.
        trusted: whether its result needs no check.
    """

    candidate: Candidate
    microseconds: float
    watch: Stopwatch
    trusted: bool = True


class Trial:
    """A comparison of one task's candidates.

    Args:
        operands: arrays that all candidates run on.
        others: creates arrays for the comparison of results if the call's arrays are unsuitable: a net's first images
            may be zeros, its first gradients may overflow their dtype.
    """

    def __init__(self, operands: Operands, others: Callable[[], Operands]) -> None:
        self.certain = True
        self._operands = operands
        self._others = others
        self._contenders: list[Contender] = []
        self._trusted: Candidate | None = None
        self._expected: list[Array] | None = None

    def add(self, family: AlgorithmFamily) -> None:
        if family.last_resort and self._contenders:
            return
        behind = 0
        for candidate in family.candidates():
            best = min((contender.microseconds for contender in self._contenders), default=float("inf"))
            contender = _attempt(candidate, self._operands, best)
            if contender is None:
                continue
            behind = behind + 1 if contender.microseconds > CLOSE * best else 0
            if contender.microseconds < float("inf"):
                contender.trusted = not family.checked
                self._contenders.append(contender)
                if contender.trusted and self._trusted is None:
                    self._trusted = candidate
            if behind == PATIENCE:
                return

    def best(self) -> tuple[Candidate | None, float]:
        """Return the fastest candidate with a correct result, after the finalists were timed again."""
        remaining = sorted(self._contenders, key=lambda contender: contender.microseconds)
        while remaining:
            most = FINALIST_RATIO * remaining[0].microseconds
            close = sum(contender.microseconds <= most for contender in remaining)
            finalists = remaining[: min(FINALISTS, max(MIN_FINALISTS, close))]
            remaining = remaining[len(finalists) :]
            if len(finalists) > 1:
                measure(finalists)
            for contender in sorted(finalists, key=lambda contender: contender.microseconds):
                if contender.trusted or self._is_right(contender.candidate):
                    return contender.candidate, contender.microseconds
        return None, 0.0

    def _results(self) -> list[Array]:
        sums = self._operands.sums
        return [self._operands.out] if sums is None else [self._operands.out, sums]

    def _trusted_results(self) -> list[Array]:
        """Return the results of a trusted candidate; empty without such a candidate or without memory."""
        if self._expected is None:
            try:
                self._expected = [] if self._trusted is None else self._comparison_results(self._trusted)
            except (cupy.cuda.memory.OutOfMemoryError, OutOfMemoryError):
                self._expected = []
        return self._expected

    def _comparison_results(self, trusted: Candidate) -> list[Array]:
        first = self._operands
        choices: tuple[Callable[[], Operands], ...] = (lambda: first, self._others)
        for operands in choices:
            self._operands = operands()
            trusted.run(self._operands)
            kept = [_copy_of(result) for result in map(flat, self._results())]
            if all(0.0 < largest(result) < float("inf") for result in kept):
                return kept
        return []

    def _is_right(self, candidate: Candidate) -> bool:
        expected = self._trusted_results()
        if not expected:
            self.certain = False
            return False
        for result in self._results():
            # All bits set are a NaN: elements that the candidate leaves out are found too.
            result.data.memset_async(0xFF, result.nbytes, cupy.cuda.get_current_stream())
        candidate.run(self._operands)
        for result, kept in zip(self._results(), expected, strict=True):
            error, limit = difference(flat(result), kept), TOLERANCE * largest(kept) + SMALLEST_STEP
            if error > limit:
                logger.warning("%s is not used: its error is %g, the limit is %g", candidate.name, error, limit)
                return False
        return True


def _copy_of(array: Array) -> Array:
    """Copy an array by memcpy; CuPy's copy would compile a kernel."""
    result = allocate(array.shape, array.dtype.name)
    copy(array, result)
    return result


def _attempt(candidate: Candidate, operands: Operands, best: float) -> Contender | None:
    """Return a timed candidate, with infinity if it is much slower than the best; None if it fails."""
    try:
        if not candidate.prepare():
            return None
        watch = Stopwatch(lambda: candidate.run(operands))
        # The first run loads the kernel, which would spoil the timing; it also shows candidates that are slower by far.
        first = _first_run(candidate, operands)
        if first > FIRST_RUN_RATIO * best + HOST_DELAY:
            logger.debug("%s is too slow: the first run takes %.0f us", candidate.name, first)
            return Contender(candidate, float("inf"), watch)
        time = _time_of_one(watch, best)
        if time > _limit(best):
            logger.debug("%s is too slow: a run takes %.1f us", candidate.name, time)
            return Contender(candidate, float("inf"), watch)
        time = watch.elapsed(max(2, min(10, int(TIMING_BUDGET / time))), time)
        logger.debug("%s takes %.1f us", candidate.name, time)
        return Contender(candidate, time, watch)
    except (DeviceError, RunError, RuntimeError) as error:
        # Such an error stays with the device, and every later call would fail with it: it must not be taken for the
        # candidate's.
        if isinstance(error, (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)):
            raise
        logger.debug("%s failed: %s", candidate.name, error)
        return None


def _first_run(candidate: Candidate, operands: Operands) -> float:
    """Return the microseconds of a run from its launch on; the kernel is loaded afterwards."""
    candidate.run(operands)
    launched = monotonic()
    cupy.cuda.get_current_stream().synchronize()
    return 1e6 * (monotonic() - launched)


def _limit(best: float) -> float:
    """Return the maximum microseconds of one run for a candidate to remain."""
    return max(PRUNE_RATIO * best, best + RESOLUTION)


def _time_of_one(watch: Stopwatch, best: float) -> float:
    """Return the microseconds of one run, or of the shorter of two if the first is close to the best time."""
    time = watch.elapsed(1)
    return min(time, watch.elapsed(1)) if _limit(best) < time <= REPEAT_RATIO * best else time


def measure(contenders: Sequence[Contender]) -> None:
    """Time contenders in turn, so that disturbances affect all of them."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(ROUNDS):
        for contender, own in zip(contenders, times, strict=True):
            about = contender.microseconds
            own.append(contender.watch.elapsed(max(2, min(20, int(2 * TIMING_BUDGET / about))), about))
    for contender, own in zip(contenders, times, strict=True):
        # Disturbances only lengthen a time, so the shortest one is the nearest to the truth.
        contender.microseconds = min(own)


def operands_for(task: Task, given: Operands | None) -> Operands:
    """Return arrays for timing: the call's arrays except dweights, which may hold a sum; else new arrays."""
    problem = task.problem
    shapes = problem.arrays(task.direction)
    weights = task.direction is Direction.WEIGHTS
    if given is not None:
        return replace(given, out=allocate(shapes[2]), accumulate=False) if weights else given
    first, second = (noise(shape, problem.array_dtype) for shape in shapes[:2])
    outputs = problem.weights[0]
    return Operands(
        first,
        second,
        allocate(shapes[2], "float32" if weights else problem.array_dtype),
        noise((outputs,), "float32") if task.bias else None,
        allocate((2, outputs)) if task.sums else None,
        residual=noise(shapes[2], problem.array_dtype) if task.residual else None,
    )


def noise(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array of ordinary random numbers; a GPU's speed depends on the values it multiplies."""
    array = allocate(shape, dtype)
    kernel = library_kernel("tuning", "noise", f"#define Element {c_type(array)}\n")
    launch(kernel, array.size, (flat(array), array.size))
    return array


def largest(array: Array) -> float:
    """Return the largest magnitude in a flat array, or infinity with a NaN. Waits for the device."""
    return _reduce_max("largest", array, array)


def difference(array: Array, expected: Array) -> float:
    """Return the largest difference of two flat arrays, or infinity with a NaN. Waits for the device."""
    return _reduce_max("difference", array, expected)


def _reduce_max(kernel: str, array: Array, expected: Array) -> float:
    bits = cupy.zeros(1, "uint32")
    compiled = library_kernel("tuning", kernel, f"#define Element {c_type(array)}\n")
    launch(compiled, array.size, (raw(array), raw(expected), bits, array.size))
    return float(bits.view("float32").get()[0])
