"""`caffepy test` and `caffepy test_detection`: score a trained model over a number of batches."""

from __future__ import annotations

import argparse
import logging
from functools import partial
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
from caffepy.training.options import TrainOptions
from caffepy.utils.options import file_list, file_name, positive

if TYPE_CHECKING:
    from caffepy.backend import Backend
    from caffepy.data.sharding import Shard
    from caffepy.distributed.processes.world import World
    from caffepy.formats.proto.caffe_pb2 import NetParameter, NetState
    from caffepy.infer.onnx_engine import RuntimeExecutor
    from caffepy.net.executor import ForwardExecutor
    from caffepy.training.evaluate_model import ScoringOptions

logger = logging.getLogger(__name__)


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
        "--ap-version", choices=("11point", "101point", "MaxIntegral", "Integral"), default="11point",
        help="average precision of detections (11point)",
    )  # fmt: skip
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
    from caffepy.distributed.processes.create import create_world
    from caffepy.distributed.processes.launcher import refuse_foreign_launcher
    from caffepy.training.evaluate_model import score_on_all_devices

    with create_world() as world:
        world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
        score_on_all_devices(world, _options(args, world, detection))
    return 0


def _options(args: argparse.Namespace, world: World, detection: bool) -> ScoringOptions:
    from caffepy.cli.nets import net_and_state, refuse_net_without_layers
    from caffepy.distributed.processes.gpu_assignment import assign_gpus
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
        partial(_make_runner, args, by_runtime, param, state),
        batches=args.iterations,
        devices=[None] * args.cpu_solvers if gpus is None else gpus,
        threads=args.threads,
        math=args.math,
        ap_version=args.ap_version,
        show_classes=args.show_per_class_result,
        detection=detection,
        timeout=args.timeout,
    )


def _make_runner(
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
