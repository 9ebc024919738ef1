"""`caffepy time`: average forward and backward milliseconds of each layer."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_device_options, add_state_options, file_list, positive
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.net import Net
    from caffepy.net.wiring import Node

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "time",
        help="time a model layer by layer",
        description="Print average forward and backward times of each layer.",
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="the net's prototxt (needed)")
    parser.add_argument("--phase", choices=("TRAIN", "TEST"), default="TRAIN", help="the net's phase (TRAIN)")
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="iterations to average over (50)")
    parser.add_argument("--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files to load first")
    add_device_options(parser, "default: the CPU")
    add_state_options(parser)


def run(args: argparse.Namespace) -> int:
    """Time the net.

    Raises:
        ConfigError: no --model.
        CaffepyError: whatever is wrong with the files, the data or the device.
    """
    if args.model is None:
        raise ConfigError("time needs a net: caffepy time --model train_val.prototxt")
    from caffepy.cli.nets import load_weights, open_net
    from caffepy.proto import caffe_pb2

    with open_net(args, caffe_pb2.Phase.Value(args.phase), args.iterations) as net:
        load_weights(net, args.weights)
        _warm_up(net)
        logger.info("*** Benchmark begins ***")
        logger.info("Testing for %d iterations.", args.iterations)
        _log_times(net, measure(net, args.iterations))
        logger.info("*** Benchmark ends ***")
    return 0


@dataclass
class Times:
    """Milliseconds, added up over the iterations.

    Args:
        layers: how many layers the net has.
    """

    layers: int
    iterations: int = 0
    forward: float = 0.0
    backward: float = 0.0
    total: float = 0.0
    layer_forward: list[float] = field(default_factory=list)
    layer_backward: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layer_forward = [0.0] * self.layers
        self.layer_backward = [0.0] * self.layers


def _warm_up(net: Net) -> None:
    """One pass each way, so that memory, plans and compiled kernels are there before the clock starts."""
    logger.info("Performing Forward")
    net.forward()
    logger.info("Initial loss: %.6g", net.loss())
    net.check()
    logger.info("Performing Backward")
    net.clear_param_diffs()
    net.backward()


def measure(net: Net, iterations: int) -> Times:
    """Run the net layer by layer, waiting for the device after each one."""
    times = Times(len(net.schedule))
    begin = time.perf_counter()
    for _ in range(iterations):
        start = time.perf_counter()
        times.forward += _pass(net, _forward, range(len(net.schedule)), times.layer_forward)
        net.context.passes.number += 1
        net.clear_param_diffs()
        times.backward += _pass(net, _backward, reversed(range(len(net.schedule))), times.layer_backward)
        times.iterations += 1
        logger.info("Iteration: %d forward-backward time: %.6g ms.", times.iterations, _milliseconds(start))
    times.total = _milliseconds(begin)
    return times


def _forward(node: Node) -> None:
    node.layer.forward(node.bottoms, node.tops)


def _backward(node: Node) -> None:
    if node.need_backward:
        node.layer.backward(node.tops, node.propagate_down, node.bottoms)


def _pass(net: Net, run: Callable[[Node], None], order: Iterable[int], sums: list[float]) -> float:
    """Run the layers in `order`, the device idle between them; adds to `sums` and returns the whole pass's time."""
    begin = time.perf_counter()
    for index in order:
        start = time.perf_counter()
        run(net.schedule[index])
        net.backend.synchronize()
        sums[index] += _milliseconds(start)
    return _milliseconds(begin)


def _milliseconds(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def _log_times(net: Net, times: Times) -> None:
    logger.info("Average time per layer: ")
    names = [node.layer.name for node in net.schedule]
    for name, forward, backward in zip(names, times.layer_forward, times.layer_backward, strict=True):
        logger.info("%10s\tforward: %.6g ms.", name, forward / times.iterations)
        logger.info("%10s\tbackward: %.6g ms.", name, backward / times.iterations)
    logger.info("Average Forward pass: %.6g ms.", times.forward / times.iterations)
    logger.info("Average Backward pass: %.6g ms.", times.backward / times.iterations)
    logger.info("Average Forward-Backward: %.6g ms.", times.total / times.iterations)
    logger.info("Total Time: %.6g ms.", times.total)
