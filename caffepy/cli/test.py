"""Commands that measure a net: `caffepy test` and `caffepy test_detection` its scores, `caffepy time` its speed.

The scores are those of a trained model over a number of batches. `time` shows the average forward and backward
milliseconds of each layer, or the speed of the data layers alone.
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from caffepy.cli.options import (
    Parser,
    add_device_options,
    add_dialect_option,
    add_engine_option,
    add_engine_options,
    add_options,
    add_state_options,
    add_switch,
)
from caffepy.errors import ConfigError
from caffepy.logs.performance_report import format_stages
from caffepy.training.options import TrainOptions
from caffepy.utils.options import file_list, file_name, positive

if TYPE_CHECKING:
    from caffepy.backend import Backend
    from caffepy.data.sharding import Shard
    from caffepy.distributed.processes.world import World
    from caffepy.formats.proto.caffe_pb2 import NetParameter, NetState
    from caffepy.infer.onnx_engine import RuntimeExecutor
    from caffepy.net import Net
    from caffepy.net.executor import ForwardExecutor
    from caffepy.net.timing import DataTimes, Times
    from caffepy.training.evaluate_model import ScoringOptions


logger = logging.getLogger(__name__)


# -- `caffepy test` and `caffepy test_detection` -------------------------------------------------------


def add_parser_test(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add `test` and its options."""
    _add_options(
        subparsers.add_parser(
            "test",
            help="score a model",
            description="Run a net's TEST phase and print each batch's scores and their mean.",
        )
    )


def add_parser_test_detection(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add `test_detection` and its options."""
    _add_options(
        subparsers.add_parser(
            "test_detection",
            help="score a model by mean average precision",
            description="Run a net's TEST phase and print the mean average precision of its DetectionEvaluate layers.",
        )
    )


def _add_options(parser: Parser) -> None:
    parser.add_argument("--model", type=file_name, metavar="FILE", help="the net's prototxt (needed)")
    parser.add_argument(
        "--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files, separated by commas (needed)"
    )
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="batches to score (50)")
    parser.add_argument(
        "--ap-version",
        choices=("11point", "101point", "MaxIntegral", "Integral"),
        default="11point",
        help="average precision of detections (11point)",
    )
    add_switch(parser, "show-per-class-result", "print the average precision of each class (on)", default=True)
    add_device_options(parser, "each batch is scored by one of them; default: the CPU")
    add_options(parser, TrainOptions, ("cpu_solvers", "timeout"))
    add_engine_options(parser)
    add_engine_option(parser)
    add_state_options(parser)
    add_dialect_option(parser)


def run_test(args: argparse.Namespace) -> int:
    """Score the model.

    Raises:
        ConfigError: no --model or no --weights; an engine that cannot compute the net.
        MissingExtraError: the engine is not installed.
        CaffepyError: files, data or device cannot be used.
    """
    return _score(args, detection=False)


def run_test_detection(args: argparse.Namespace) -> int:
    """Score a net whose outputs are made by DetectionEvaluate layers; errors as of `run_test`."""
    return _score(args, detection=True)


def _score(args: argparse.Namespace, detection: bool) -> int:
    from caffepy.distributed.processes.launcher import refuse_foreign_launcher
    from caffepy.distributed.processes.world import create_world
    from caffepy.training.evaluate_model import score_on_all_devices

    with create_world() as world:
        world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
        score_on_all_devices(world, _options(args, world, detection))
    return 0


def _options(args: argparse.Namespace, world: World, detection: bool) -> ScoringOptions:
    from caffepy.cli.nets import net_and_state, refuse_net_without_layers
    from caffepy.distributed.placement import assign_gpus
    from caffepy.formats.proto import caffe_pb2
    from caffepy.infer.onnx_engine import wants_runtime
    from caffepy.training.devices import check_gpus
    from caffepy.training.evaluate_model import ScoringOptions

    def prepare() -> tuple[NetParameter, NetState, bool, list[int] | None]:
        if args.model is None:
            raise ConfigError(f"{args.command} needs a net: --model train_val.prototxt --weights net.caffemodel")
        if not args.weights:
            raise ConfigError(f"{args.command} needs trained weights: --weights net.caffemodel")
        by_runtime = wants_runtime(args.engine, not args.gpus)
        param, state = net_and_state(args, caffe_pb2.TEST)
        refuse_net_without_layers(args.model, param, state)
        return param, state, by_runtime, None if args.gpus is None else check_gpus(args.gpus)

    param, state, by_runtime, found = world.run_on_all(prepare)
    gpus = assign_gpus(world, found, named=True)
    if gpus is None:
        logger.info("Use CPU.")
    else:
        logger.info("Use GPU with device ID %s", ", ".join(map(str, gpus)))
    return ScoringOptions(
        partial(_make_executor, args, by_runtime, param, state),
        batches=args.iterations,
        devices=[None] * args.cpu_solvers if gpus is None else gpus,
        threads=args.threads,
        math=args.math,
        ap_version=args.ap_version,
        show_classes=args.show_per_class_result,
        detection=detection,
        timeout=args.timeout,
    )


def _make_executor(
    args: argparse.Namespace, by_runtime: bool, param: NetParameter, state: NetState, backend: Backend, shard: Shard
) -> ForwardExecutor | RuntimeExecutor:
    from caffepy.cli.nets import read_weights
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext

    resolve = PathResolver(args.model)
    context = LayerContext(
        backend, phase=caffe_pb2.TEST, shard=shard, test_iter=args.iterations, resolve=resolve, timeout=args.timeout
    )
    weights = read_weights(args.weights)
    if by_runtime:
        from caffepy.infer.onnx_engine import RuntimeExecutor
        from caffepy.net import Net

        net = Net(param, context, state)
        try:
            for layers, origin in weights:
                net.copy_trained_layers_from(layers, origin)
            return RuntimeExecutor(net, param, state)
        except BaseException:
            net.close()
            raise
    from caffepy.net.executor import prepare_inference

    fuse, share = args.fuse and not param.debug_info, args.share and not param.debug_info
    return prepare_inference(param, context, state, weights=weights, fuse=fuse, share=share, eager=args.eager)


# -- `caffepy time` ------------------------------------------------------------------------------------


def add_parser_time(subparsers: argparse._SubParsersAction[Parser]) -> None:
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


def run_time(args: argparse.Namespace) -> int:
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
            layer.name,
            layer.images_per_second,
            layer.batches,
            layer.batch_size,
            layer.seconds,
            layer.cores,
        )
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
