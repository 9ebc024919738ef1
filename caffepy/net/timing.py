"""Layer-by-layer timing of a net, for `caffepy time` and `caffepy plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from caffepy.net.net import Net
from caffepy.net.wiring import Node

Samples = list[float]
"""Milliseconds, one value per iteration."""


@dataclass
class Times:
    """Milliseconds of each layer and of whole passes.

    Args:
        layers: the number of layers in the net's schedule.
        forward: times of whole forward passes.
        backward: times of whole backward passes.
        total: time from the start of the first iteration to the end of the last.
        layer_forward: times of the forward passes of each layer of the schedule.
        layer_backward: times of the backward passes of each layer.
    """

    layers: int
    forward: Samples = field(default_factory=list)
    backward: Samples = field(default_factory=list)
    total: float = 0.0
    layer_forward: list[Samples] = field(default_factory=list)
    layer_backward: list[Samples] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layer_forward = [[] for _ in range(self.layers)]
        self.layer_backward = [[] for _ in range(self.layers)]

    def means(self) -> list[tuple[float, float]]:
        """Return the mean forward and backward time of each layer."""
        return [(fmean(f), fmean(b)) for f, b in zip(self.layer_forward, self.layer_backward, strict=True)]

    def medians(self) -> list[tuple[float, float]]:
        """Return the median forward and backward time of each layer, which is robust against outliers."""
        return [(median(f), median(b)) for f, b in zip(self.layer_forward, self.layer_backward, strict=True)]


def measure(net: Net, iterations: int, report: Callable[[int, float], None] | None = None) -> Times:
    """Run the net forward and backward, waiting for the device after each layer.

    Args:
        net: must have run once, so that memory, plans and compiled kernels exist.
        iterations: number of iterations, at least 1.
        report: called after each iteration with its number (from 1) and its milliseconds.
    """
    times = Times(len(net.schedule))
    begin = time.perf_counter()
    for iteration in range(iterations):
        start = time.perf_counter()
        times.forward.append(_pass(net, _forward, range(len(net.schedule)), times.layer_forward))
        net.context.passes.number += 1
        net.clear_param_diffs()
        times.backward.append(_pass(net, _backward, reversed(range(len(net.schedule))), times.layer_backward))
        if report is not None:
            report(iteration + 1, milliseconds_since(start))
    times.total = milliseconds_since(begin)
    return times


def milliseconds_since(start: float) -> float:
    """Return the milliseconds since `start`, a value of `time.perf_counter`."""
    return (time.perf_counter() - start) * 1e3


def _forward(node: Node) -> None:
    node.layer.forward(node.bottoms, node.tops)


def _backward(node: Node) -> None:
    if node.need_backward:
        node.layer.backward(node.tops, node.propagate_down, node.bottoms)


def _pass(net: Net, run: Callable[[Node], None], order: Iterable[int], samples: list[Samples]) -> float:
    """Run the layers in `order`, waiting for the device after each; return the whole pass's time."""
    begin = time.perf_counter()
    for index in order:
        start = time.perf_counter()
        run(net.schedule[index])
        net.backend.synchronize()
        samples[index].append(milliseconds_since(start))
    return milliseconds_since(begin)
