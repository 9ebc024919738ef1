"""`caffepy test`: score a trained model over a number of batches."""

from __future__ import annotations

import argparse
import logging
from contextlib import closing
from typing import TYPE_CHECKING

from caffepy.cli.options import (
    Parser,
    add_device_options,
    add_dialect_option,
    add_engine_option,
    add_engine_options,
    add_state_options,
)
from caffepy.errors import ConfigError
from caffepy.options.types import file_list, file_name, positive

if TYPE_CHECKING:
    import numpy as np

    from caffepy.layers import LayerContext
    from caffepy.net import Net
    from caffepy.net.forward_runner import ForwardRunner
    from caffepy.onnx.engine import RuntimeRunner
    from caffepy.proto.caffe_pb2 import NetParameter, NetState

    Runner = ForwardRunner | RuntimeRunner

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "test", help="score a model", description="Run a net's TEST phase and print each batch's scores and their mean."
    )
    parser.add_argument("--model", type=file_name, metavar="FILE", help="the net's prototxt (needed)")
    parser.add_argument(
        "--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files, separated by commas (needed)"
    )
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="batches to score (50)")
    parser.add_argument(
        "--ap-version", choices=("11point", "101point", "MaxIntegral", "Integral"), default="11point",
        help="average precision of detections (11point)",
    )  # fmt: skip
    add_device_options(parser, "default: the CPU")
    add_engine_options(parser)
    add_engine_option(parser)
    add_state_options(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Score the model.

    Raises:
        ConfigError: no --model or no --weights; an engine that cannot compute the net.
        MissingExtraError: the engine is not installed.
        CaffepyError: files, data or device cannot be used.
    """
    if args.model is None:
        raise ConfigError("test needs a net: caffepy test --model train_val.prototxt --weights net.caffemodel")
    if not args.weights:
        raise ConfigError("test needs trained weights: --weights net.caffemodel")
    from caffepy.cli.nets import net_setup
    from caffepy.onnx.engine import wants_runtime
    from caffepy.proto import caffe_pb2

    by_runtime = wants_runtime(args.engine, not args.gpus)
    with (
        net_setup(args, caffe_pb2.TEST, args.iterations) as setup,
        closing(_runner(args, by_runtime, *setup)) as runner,
    ):
        if runner.net.inputs:
            names = ", ".join(runner.net.inputs)
            logger.warning("The inputs of this net (%s) are not filled: the scores are for zero inputs.", names)
        logger.info("Running for %d iterations.", args.iterations)
        _log_means(runner.net, *_score(runner, args.iterations, args.ap_version), args.iterations)
    return 0


def _runner(
    args: argparse.Namespace, by_runtime: bool, param: NetParameter, context: LayerContext, state: NetState
) -> Runner:
    from caffepy.cli.nets import read_weights

    weights = read_weights(args.weights)
    if by_runtime:
        from caffepy.net import Net
        from caffepy.onnx.engine import RuntimeRunner

        net = Net(param, context, state)
        try:
            for layers, origin in weights:
                net.copy_trained_layers_from(layers, origin)
            return RuntimeRunner(net, param, state)
        except BaseException:
            net.close()
            raise
    from caffepy.net.forward_runner import prepare_inference

    fuse, share = args.fuse and not param.debug_info, args.share and not param.debug_info
    return prepare_inference(param, context, state, weights=weights, fuse=fuse, share=share, eager=args.eager)


def _score(runner: Runner, iterations: int, ap_version: str) -> tuple[dict[str, np.ndarray], float]:
    """Return the sums of all flattened outputs and of the loss over the batches; log mean average precisions.

    Raises:
        ConfigError: the size of an output differs between batches.
    """
    from caffepy.solvers.detection import DetectionScores, detection_outputs
    from caffepy.solvers.testing import refuse_changing_outputs

    net = runner.net
    detections = DetectionScores(net, ap_version, True, log=logger.info)
    summed = {name: blob for name, blob in net.outputs.items() if name not in detection_outputs(net)}
    refuse_changing_outputs(net, summed)
    sums: dict[str, np.ndarray] = {}
    loss = 0.0
    for batch in range(iterations):
        runner.forward()
        loss += net.loss()
        net.raise_device_errors()
        detections.take(batch)
        for name, blob in summed.items():
            scores = blob.host_data().astype("float64").ravel()
            for score in scores:
                logger.info("Batch %d, %s = %.6g", batch, name, score)
            sums[name] = sums[name] + scores if name in sums else scores
    detections.means()
    return sums, loss


def _log_means(net: Net, sums: dict[str, np.ndarray], loss: float, iterations: int) -> None:
    logger.info("Loss: %.6g", loss / iterations)
    for name, scores in sums.items():
        weight = net.loss_weight(net.outputs[name])
        for mean in scores / iterations:
            share = f" (* {weight:.6g} = {weight * mean:.6g} loss)" if weight else ""
            logger.info("%s = %.6g%s", name, mean, share)
