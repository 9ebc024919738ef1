"""`caffepy test`: score a trained model over a number of batches."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_device_options, add_state_options, file_list, positive
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from caffepy.net import Net

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "test", help="score a model", description="Run a net's TEST phase and print each batch's scores and their mean."
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="the net's prototxt (needed)")
    parser.add_argument(
        "--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files, divided by commas (needed)"
    )
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="batches to score (50)")
    add_device_options(parser, "default: the CPU")
    add_state_options(parser)


def run(args: argparse.Namespace) -> int:
    """Score the model.

    Raises:
        ConfigError: no --model or no --weights.
        CaffepyError: whatever is wrong with the files, the data or the device.
    """
    if args.model is None:
        raise ConfigError("test needs a net: caffepy test --model train_val.prototxt --weights net.caffemodel")
    if not args.weights:
        raise ConfigError("test needs trained weights: --weights net.caffemodel")
    from caffepy.cli.nets import load_weights, open_net
    from caffepy.proto import caffe_pb2

    with open_net(args, caffe_pb2.TEST, args.iterations) as net:
        load_weights(net, args.weights)
        logger.info("Running for %d iterations.", args.iterations)
        _log_means(net, *_score(net, args.iterations), args.iterations)
    return 0


def _score(net: Net, iterations: int) -> tuple[dict[str, np.ndarray], float]:
    """The sums of all outputs over the batches, flattened, and of the loss."""
    sums: dict[str, np.ndarray] = {}
    loss = 0.0
    for batch in range(iterations):
        net.forward()
        loss += net.loss()
        net.raise_device_errors()
        for name, blob in net.outputs.items():
            scores = blob.host_data().astype("float64").ravel()
            for score in scores:
                logger.info("Batch %d, %s = %.6g", batch, name, score)
            sums[name] = sums[name] + scores if name in sums else scores
    return sums, loss


def _log_means(net: Net, sums: dict[str, np.ndarray], loss: float, iterations: int) -> None:
    logger.info("Loss: %.6g", loss / iterations)
    for name, scores in sums.items():
        weight = net.loss_weight(net.outputs[name])
        for mean in scores / iterations:
            share = f" (* {weight:.6g} = {weight * mean:.6g} loss)" if weight else ""
            logger.info("%s = %.6g%s", name, mean, share)
