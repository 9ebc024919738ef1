"""`caffepy time`: average forward and backward milliseconds of each layer, or the speed of the data layers alone."""

from __future__ import annotations

import argparse
import logging
from statistics import fmean
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_device_options, add_dialect_option, add_state_options
from caffepy.errors import ConfigError
from caffepy.logs.data_waits import format_stages
from caffepy.utils.options import file_list, file_name, positive

if TYPE_CHECKING:
    from caffepy.net import Net
    from caffepy.net.timing import DataTimes, Times

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "time",
        help="time a model layer by layer",
        description="Print average forward and backward times of each layer, or with --data how many images a second "
        "each data layer reads, and the share of each stage.",
    )
    parser.add_argument("--model", type=file_name, metavar="FILE", help="the net's prototxt (needed)")
    parser.add_argument("--phase", choices=("TRAIN", "TEST"), default="TRAIN", help="the net's phase (TRAIN)")
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="iterations to average over (50)")
    parser.add_argument("--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files to load first")
    parser.add_argument("--data", action="store_true", help="time only the reading of the data layers")
    add_device_options(parser, "default: the CPU")
    add_state_options(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Time the net.

    Raises:
        ConfigError: no --model, or --data and no layer reads ahead.
        CaffepyError: files, data or device cannot be used.
    """
    if args.model is None:
        raise ConfigError("time needs a net: caffepy time --model train_val.prototxt")
    from caffepy.cli.nets import open_net
    from caffepy.formats.proto import caffe_pb2
    from caffepy.net.timing import measure, measure_data

    with open_net(args, caffe_pb2.Phase.Value(args.phase), args.iterations, args.weights) as net:
        if args.data:
            _log_data_times(measure_data(net, args.iterations))
            return 0
        _warm_up(net)
        logger.info("*** Benchmark begins ***")
        logger.info("Testing for %d iterations.", args.iterations)
        _log_times(net, measure(net, args.iterations, _log_iteration))
        logger.info("*** Benchmark ends ***")
    return 0


def _log_data_times(times: list[DataTimes]) -> None:
    for layer in times:
        logger.info(
            "%10s\t%.0f images/s (%d batches of %d in %.3g s), %.1f cores used",
            layer.name, layer.images_per_second, layer.batches, layer.batch_size, layer.seconds, layer.cores,
        )  # fmt: skip
        if shares := format_stages(layer.stages, sum(layer.stages.values())):
            logger.info("%10s\t%s of the threads' time", layer.name, shares)


def _warm_up(net: Net) -> None:
    """Run one forward and backward pass, so that allocation, tuning and compilation are not timed."""
    logger.info("Performing Forward")
    net.forward()
    logger.info("Initial loss: %.6g", net.loss())
    net.raise_device_errors()
    logger.info("Performing Backward")
    net.clear_param_diffs()
    net.backward()


def _log_iteration(number: int, milliseconds: float) -> None:
    logger.info("Iteration: %d forward-backward time: %.6g ms.", number, milliseconds)


def _log_times(net: Net, times: Times) -> None:
    logger.info("Average time per layer: ")
    for node, (forward, backward) in zip(net.schedule, times.means(), strict=True):
        logger.info("%10s\tforward: %.6g ms.", node.layer.name, forward)
        logger.info("%10s\tbackward: %.6g ms.", node.layer.name, backward)
    logger.info("Average Forward pass: %.6g ms.", fmean(times.forward))
    logger.info("Average Backward pass: %.6g ms.", fmean(times.backward))
    logger.info("Average Forward-Backward: %.6g ms.", times.total / len(times.forward))
    logger.info("Total Time: %.6g ms.", times.total)
