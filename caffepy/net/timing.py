"""Timing of a net layer by layer, and of its data layers alone, for `caffepy time` and `caffepy plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from caffepy.errors import ConfigError
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.net.graph import Node
from caffepy.net.net import Net

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


@dataclass(frozen=True)
class DataTimes:
    """How fast a data layer reads.

    Args:
        name: the layer's.
        batches: batches that were timed.
        batch_size: images of a batch.
        seconds: their time.
        cores: cores that the process and its reading processes used meanwhile.
        stages: seconds of the reader's threads in each stage (`caffepy.logs.performance_report`); empty: not measured.
    """

    name: str
    batches: int
    batch_size: int
    seconds: float
    cores: float
    stages: dict[str, float]

    @property
    def images_per_second(self) -> float:
        """batches * batch_size / seconds."""
        return self.batches * self.batch_size / self.seconds


def measure_data(net: Net, iterations: int) -> list[DataTimes]:
    """Take batches from each data layer as training does, without copying them to the device.

    Args:
        net: is not run.
        iterations: number of batches of each layer, after the batches that are read ahead at the start.

    Raises:
        ConfigError: no layer reads ahead.
        DataError: a record cannot be read.
    """
    layers = [layer for layer in net.layers if isinstance(layer, PrefetchingLayer)]
    if not layers:
        raise ConfigError("the net has no data layer that reads ahead; --data times only such layers")
    return [_measure_data_layer(layer, net.context.passes.number, iterations) for layer in layers]


def _measure_data_layer(layer: PrefetchingLayer, number: int, iterations: int) -> DataTimes:
    end = number + layer.batches_ahead() + 2
    while number < end:  # threads start and kernels are compiled
        number += _take_batch(layer, number)
    batches, before = 0, layer.stage_totals()
    start, cpu = time.perf_counter(), time.process_time() + layer.processor_seconds()
    while batches < iterations:
        batches += _take_batch(layer, number + batches)
    seconds, cpu = time.perf_counter() - start, time.process_time() + layer.processor_seconds() - cpu
    stages = {stage: value - before.get(stage, 0.0) for stage, value in layer.stage_totals().items()}
    return DataTimes(layer.name, batches, layer.schedule.count, seconds, cpu / seconds, stages)


def _take_batch(layer: PrefetchingLayer, number: int) -> int:
    """Wait for the batch that begins with pass `number` and give it back; return its passes."""
    prefetcher, batch = layer.next_batch(number)
    passes = batch.passes
    prefetcher.release(batch)
    return passes


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
