"""A loss that is not finite: where it began, and what to do."""

from __future__ import annotations

import logging
from contextlib import suppress

from caffepy.errors import CaffepyError, NonFiniteError
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.training.graph_executor import GraphExecutor

log = logging.getLogger(__name__)


def report_non_finite(
    loss: float, iteration: int, net: Net, executor: GraphExecutor, shares: bool, keep_going: bool
) -> None:
    """Name the first layer whose output is not finite, as far as one device can tell that is about to stop.

    Args:
        loss: of the train net.
        iteration: for the message.
        net: the train net.
        executor: its captured iterations.
        shares: whether blobs of the net share memory.
        keep_going: log a warning.

    Raises:
        NonFiniteError: unless `keep_going`.
    """
    net.raise_device_errors()
    kept = not (executor.captured or shares)  # the blobs are as they were when the loss was computed
    node: Node | None = None
    if kept:
        node = net.first_non_finite()
    elif not keep_going and not any(layer.communicates() for layer in net.layers):
        executor.drain()
        with suppress(CaffepyError):  # the loss stops training
            node = net.first_non_finite(anew=True)
    message = f"the loss is {loss:g}"
    if node is not None:
        when = "" if kept else "in another forward pass "
        message += f"; {when}the first layer whose output is not finite is '{node.layer.name}' ({node.layer.type})"
        if not all(net.backend.all_finite(blob.data) for blob in node.layer.blobs):
            message += ", and its parameters are not finite either"
    if not keep_going:
        raise NonFiniteError(f"{message}; lower base_lr, set clip_gradients, or go on with --keep-going", iteration)
    log.warning("iteration %d: %s", iteration, message)
