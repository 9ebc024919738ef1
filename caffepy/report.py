"""The performance report: how fast each device trained, per rank and in all (NVIDIA Caffe's `Solver::perf_report`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 2
"""Iterations at the start of a run that are left out: they allocate, compile and plan."""


@dataclass
class Performance:
    """What one solver did, its first `WARM_UP` iterations left out.

    Args:
        batch: samples that this device takes in one iteration, all `iter_size` passes together.
        iterations: iterations that were timed.
        seconds: what they took, tests and snapshots left out.
        device: what the report calls the device: ``0`` for a GPU's number, ``CPU``, ``CPU 1`` for a second CPU solver.
    """

    batch: int = 0
    iterations: int = 0
    seconds: float = 0.0
    device: str = "CPU"

    @property
    def iterations_per_second(self) -> float:
        """iterations / seconds; 0 where nothing was timed."""
        return self.iterations / self.seconds if self.seconds > 0 else 0.0

    @property
    def images_per_second(self) -> float:
        """iterations / seconds * batch."""
        return self.iterations_per_second * self.batch


def format_performance(performance: Performance) -> str:
    """``Solver performance on device 0: 51.2 * 64 = 3277 img/sec (998 itr in 19.5 sec)``."""
    return (
        f"Solver performance on device {performance.device}: "
        f"{_significant(performance.iterations_per_second)} * {performance.batch} = "
        f"{_significant(performance.images_per_second)} img/sec "
        f"({performance.iterations} itr in {_significant(performance.seconds)} sec)"
    )


def format_report(ranks: Sequence[Sequence[Performance]]) -> list[str]:
    """The whole report: a line a device, a line a rank where it has several devices, one for all.

    Args:
        ranks: the performance of each rank's devices, in the order of the ranks.
    """
    lines = []
    for rank, devices in enumerate(ranks):
        node = f"Node {{{rank}}} " if len(ranks) > 1 else ""
        for i, performance in enumerate(devices):
            root = "root " if i == 0 else "     "
            lines.append(f"{node}{root if node else root.capitalize()}{format_performance(performance)}")
        if node and len(devices) > 1:
            lines.append(f"{node}performance: {_significant(_total(devices))} img/sec")
    if sum(map(len, ranks)) > 1:
        lines.append(f"Overall performance: {_significant(sum(map(_total, ranks)))} img/sec")
    return lines


def _total(devices: Sequence[Performance]) -> float:
    return sum(p.images_per_second for p in devices)


def _significant(value: float) -> str:
    """Four significant digits, as NVIDIA Caffe prints, but never with an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
