"""The stages of the way of data to the device, and where the time of training's waits goes.

`caffepy.data.loader` measures the stages, `caffepy.layers.input` the waits; the solver's log and report show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

READING, DECODING, TRANSFORMING, COPYING = STAGES = ("reading", "decoding", "transforming", "copying")
"""Reading records, decoding images, transforming pixels, and copying batches to the device."""


class StageTimes:
    """Adds up the seconds that the threads of a loader spend in each stage. `add` is thread-safe."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float]] = []
        self._seconds = dict.fromkeys(STAGES, 0.0)

    def add(self, stage: str, start: float) -> float:
        """Add the time since `start`, a value of `perf_counter`; return the present time."""
        now = perf_counter()
        self._spans.append((stage, now - start))  # one atomic operation: += would lose seconds of other threads
        return now

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage, added over all threads. One thread at a time may call it."""
        spans, self._spans = self._spans, []
        for stage, seconds in spans:
            self._seconds[stage] += seconds
        return dict(self._seconds)


class Waits:
    """Seconds that a solver waited for data, by stage.

    A wait for a batch is divided among the stages in the ratio of the seconds that the loader's threads spent in them
    since the last wait.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._before: Mapping[str, float] = {}

    def add(self, waited: float, totals: Mapping[str, float]) -> None:
        """Add a wait for a batch.

        Args:
            waited: seconds.
            totals: `StageTimes.totals` of the loader after the wait; empty if it does not measure stages, which counts
                as reading.
        """
        spent = {stage: seconds - self._before.get(stage, 0.0) for stage, seconds in totals.items()}
        busy = sum(spent.values())
        if not waited > 0:
            return
        self._before = totals
        if not busy > 0:
            self.seconds[READING] += waited
            return
        for stage, seconds in spent.items():
            self.seconds[stage] += waited * seconds / busy


def format_stages(seconds: Mapping[str, float], total: float) -> str:
    """Return ``decoding 10 %, reading 2 %``: shares of `total`, the largest first, without those below 0.5 %."""
    shares = sorted(((100 * value / total, stage) for stage, value in seconds.items() if total > 0), reverse=True)
    return ", ".join(f"{stage} {share:.0f} %" for share, stage in shares if share >= 0.5)


def format_waits(seconds: Mapping[str, float], total: float) -> str:
    """Return ``12 % of the time (decoding 10 %, reading 2 %)``.

    Args:
        seconds: of waiting, by stage.
        total: seconds in which they fell.
    """
    share = min(sum(seconds.values()) / total, 1.0) if total > 0 else 0.0
    parts = format_stages(seconds, total)
    return f"{100 * share:.0f} % of the time" + (f" ({parts})" if parts else "")
