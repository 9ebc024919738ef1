"""How long runs of a candidate take on the device, without the gaps that the host's launches would leave.

The device idles before the runs for as long as the host is expected to need: for the first launch, and for what each
further launch takes longer than a run. When each launch was done says afterwards whether any of them came too late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from caffepy.backend.cuda.compiler import launch_blocks, library_kernel
from caffepy.backend.cuda.device import cupy

FIRST_LAUNCH = 60_000
"""Nanoseconds until the first run is taken to be launched, before that was timed; an event comes before it."""

LAUNCH = 40_000
"""The same for each further run."""

MARGIN = 20_000
"""Nanoseconds of idling more than expected, because launches differ."""

LONGEST_IDLING = 20_000_000
"""Nanoseconds of idling at most, where the host was held up."""

MAX_TRIES = 3
"""How often the same runs are timed, as long as the host is held up."""


class Stopwatch:
    """Times the runs of one candidate; learns how long the host takes to launch one.

    Args:
        run: launches one.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._first = FIRST_LAUNCH
        self._launch = LAUNCH

    def elapsed(self, runs: int, about: float = 0.0) -> float:
        """Microseconds of one of several runs that follow each other without a gap.

        Runs that were launched too late are timed again behind a longer idling.

        Args:
            runs: how many.
            about: microseconds that one takes, where that is known.
        """
        wait = self._first + MARGIN + (runs - 1) * max(0, self._launch - int(about * 1e3))
        for _ in range(MAX_TRIES):
            wait = min(wait, LONGEST_IDLING)
            time, launched = _timed(self._run, runs, wait)
            late = lateness(launched, wait, time)
            if late <= 0:
                break
            wait += 2 * late + MARGIN
        self._first = launched[0]
        self._launch = (launched[-1] - launched[0]) // (runs - 1) if runs > 1 else launched[0]
        return time


def lateness(launched: Sequence[int], wait: int, time: float) -> int:
    """Nanoseconds by which the latest of some runs was launched after the device could have begun it.

    Args:
        launched: when each launch was done, in nanoseconds since the device began to idle.
        wait: how many it idled.
        time: microseconds of one run, gaps counted, which make every gap show: with a gap before run i of n, the time
            that it adds to the first i runs is less than itself.
    """
    return max(moment - wait - int(number * time * 1e3) for number, moment in enumerate(launched))


def _timed(run: Callable[[], None], runs: int, wait: int) -> tuple[float, list[int]]:
    """Microseconds of a run, and when each launch was done, in nanoseconds since the device's idling was launched."""
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
