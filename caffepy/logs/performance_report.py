"""The performance report: how fast each device trained, per rank and in all, and where it waited for data.

The report is that of NVIDIA Caffe's `Solver::perf_report`. Data pass several stages on their way to the device.
`caffepy.data.loader` measures the stages, `caffepy.layers.input` the waits; the solver's log and report show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

# -- waits for data ------------------------------------------------------------------------------------

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


# -- the report ----------------------------------------------------------------------------------------

WARM_UP = 2
"""Iterations at the start that are not timed, because they allocate, compile and tune."""

_ADVICE = {
    READING: "use a faster disk, or read more batches ahead with data_param { prefetch: N }",
    DECODING: "give the process more cores, store smaller images, or store pixels (convert_imageset without --encoded)",
    TRANSFORMING: "give the process more cores, or resize the images once with `caffepy convert_imageset`",
    COPYING: "lower batch_size or crop_size: the link to the device is the limit",
}
_WAIT_SHARE = 0.05
"""Share of waiting for data from which the report gives advice."""


@dataclass
class Performance:
    """One solver's throughput, measured after the first `WARM_UP` iterations.

    Args:
        batch: samples that this device takes in one iteration, all `iter_size` passes together.
        iterations: iterations that were timed.
        made: all iterations since the start, or since the snapshot that the training resumed from.
        seconds: their duration, without tests and snapshots.
        device: its label in the report: ``0`` for a GPU's number, ``CPU``, ``CPU 1`` for a second CPU solver.
        communication: seconds of them from the start of each iteration's first all-reduce to the end of its last; None
            on a single device, or where it is not measured.
        exposed: seconds of them in which the device waited for an all-reduce.
        waits: seconds of them in which the device waited for data, by stage; None: no data layer reads ahead.
    """

    batch: int = 0
    iterations: int = 0
    seconds: float = 0.0
    device: str = "CPU"
    communication: float | None = None
    exposed: float | None = None
    waits: dict[str, float] | None = None
    made: int = 0

    @property
    def iterations_per_second(self) -> float:
        """iterations / seconds; 0 where nothing was timed."""
        return self.iterations / self.seconds if self.seconds > 0 else 0.0

    @property
    def images_per_second(self) -> float:
        """iterations / seconds * batch."""
        return self.iterations_per_second * self.batch

    def single_rate(self, measured: float | None = None) -> float | None:
        """Images per second of this device when it trains alone.

        Args:
            measured: the measured rate of one device; None: an estimate from this device's time without `exposed`,
                itself None if `exposed` is not known.
        """
        if measured is not None:
            return measured
        if self.exposed is None or not self.seconds > self.exposed:
            return None
        return self.iterations * self.batch / (self.seconds - self.exposed)


def format_performance(performance: Performance, measured: float | None = None) -> str:
    """One device's line; unknown columns are omitted. As in NVIDIA Caffe, the iterations include those of the start.

    ``Solver performance on device 0: 51.2 * 64 = 3277 img/sec (1000 itr in 19.5 sec), communication 3.1 sec, exposed
    0.5 sec, scaling 0.974``
    """
    return (
        f"Solver performance on device {performance.device}: "
        f"{_significant(performance.iterations_per_second)} * {performance.batch} = "
        f"{_significant(performance.images_per_second)} img/sec "
        f"({performance.made} itr in {_significant(performance.seconds)} sec)"
        f"{_communication(performance)}{_scaling([performance], measured)}"
    )


def format_report(ranks: Sequence[Sequence[Performance]], measured: float | None = None) -> list[str]:
    """The whole report: a line a device, a line a rank where it has several devices, one for all, the waits for data.

    Args:
        ranks: the performance of each rank's devices, in the order of the ranks.
        measured: images a second of one device that trains alone, for the scaling column; None: an estimate from each
            device's time without `exposed`.
    """
    if len(ranks) == len(ranks[0]) == 1:
        return [format_performance(ranks[0][0], measured), *_waiting(ranks[0])]
    lines = []
    for rank, devices in enumerate(ranks):
        node = f"Node {{{rank}}} " if len(ranks) > 1 else ""
        for i, performance in enumerate(devices):
            root = "root " if i == 0 else "     "
            lines.append(f"{node}{root if node else root.capitalize()}{format_performance(performance, measured)}")
        if node and len(devices) > 1:
            rate = _significant(_total(devices))
            lines.append(f"{node}{_multi_gpu(devices)}performance: {rate} img/sec{_scaling(devices, measured)}")
    all_devices = [performance for devices in ranks for performance in devices]
    if len(all_devices) > 1:
        rate = _significant(_total(all_devices))
        kind = _multi_gpu(all_devices) if len(ranks) == 1 else ""
        lines.append(f"Overall {kind}performance: {rate} img/sec{_scaling(all_devices, measured)}")
    return [*lines, *_waiting(all_devices)]


def _waiting(devices: Sequence[Performance]) -> list[str]:
    """Return the share of the time in which devices waited for data, and what reduces the longest of the waits."""
    readers = [performance for performance in devices if performance.waits is not None and performance.seconds > 0]
    total = sum(performance.seconds for performance in readers)
    waits: dict[str, float] = {}
    for performance in readers:
        for stage, seconds in (performance.waits or {}).items():
            waits[stage] = waits.get(stage, 0.0) + seconds
    if not total > 0:
        return []
    lines = [f"Waited for data {format_waits(waits, total)}"]
    if sum(waits.values()) >= _WAIT_SHARE * total:
        longest = max(waits, key=lambda stage: waits[stage])
        lines.append(f"Most of it is {longest}: {_ADVICE[longest]}")
    return lines


def _multi_gpu(devices: Sequence[Performance]) -> str:
    """NVIDIA Caffe's word for the GPUs of one process (`parallel.cpp`)."""
    return "multi-GPU " if all(performance.device.isdecimal() for performance in devices) else ""


def _total(devices: Sequence[Performance]) -> float:
    return sum(p.images_per_second for p in devices)


def _communication(performance: Performance) -> str:
    if performance.communication is None or performance.exposed is None:
        return ""
    seconds = map(_significant, (performance.communication, performance.exposed))
    return ", communication {} sec, exposed {} sec".format(*seconds)


def _scaling(devices: Sequence[Performance], measured: float | None) -> str:
    """images/s of all devices / (their number * images/s of one alone)."""
    single = [performance.single_rate(measured) for performance in devices]
    known = [rate for rate in single if rate is not None]
    if len(known) < len(single) or not sum(known) > 0:
        return ""
    return f", scaling {_total(devices) / sum(known):.3f}"


def _significant(value: float) -> str:
    """Format with four significant digits, as NVIDIA Caffe does, but without an exponent."""
    if value < 1e-4:
        return "0"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
