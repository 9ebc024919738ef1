"""The loss: what is shown, the mean over `average_loss` iterations and all devices; and one that is not finite."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from caffepy.errors import CaffepyError, NonFiniteError
from caffepy.solvers.callbacks import SolverCallback

if TYPE_CHECKING:
    from caffepy.net.wiring import Node
    from caffepy.solvers.base import Solver

log = logging.getLogger(__name__)


class LossWindow:
    """The losses of the last iterations of this device.

    Args:
        length: the solver's `average_loss`.
    """

    def __init__(self, length: int) -> None:
        self._losses: deque[float] = deque(maxlen=max(length, 1))

    def add(self, loss: float) -> None:
        """Enter the loss of one iteration."""
        self._losses.append(loss)

    def mean(self) -> float:
        """The mean of what is in the window; 0 before the first loss."""
        return sum(self._losses) / max(len(self._losses), 1)

    def averaged(self, callback: SolverCallback) -> list[float]:
        """The window averaged over all devices, the oldest loss first; every device must call it."""
        values = callback.sum_over_devices(np.array(self._losses, np.float64))
        return [float(value) for value in values / callback.world_size]

    def restore(self, losses: list[float]) -> None:
        """Fill the window from a snapshot."""
        self._losses.clear()
        self._losses.extend(losses)


def finite_loss(solver: Solver) -> float:
    """The loss of the train net's last forward pass, looked at as by `check_finite`."""
    loss = solver.net.loss()
    check_finite(solver, loss)
    return loss


def check_finite(solver: Solver, loss: float) -> None:
    """Stop at a loss that is not finite, or warn where training shall go on.

    Raises:
        NonFiniteError: it is not; the message says where that began.
    """
    if math.isfinite(loss):
        return
    solver.net.raise_device_errors()
    message = f"iteration {solver.iteration}: the loss is {loss:g}"
    node = _first_non_finite(solver)
    if node is not None:
        when = "" if solver.keeps_blobs else "in another forward pass "
        message += f"; {when}the first layer whose output is not finite is '{node.layer.name}' ({node.layer.type})"
        if not all(solver.backend.all_finite(blob.data) for blob in node.layer.blobs):
            message += ", and its parameters are not finite either"
    if not solver.keep_going:
        raise NonFiniteError(f"{message}; lower base_lr, set clip_gradients, or go on with --keep-going")
    log.warning("%s", message)


def check_skipped(solver: Solver) -> None:
    """Stop where too many updates in a row were left out; what the device was asked for is done.

    Raises:
        NonFiniteError: naming the layer whose gradient overflowed.
    """
    try:
        solver.updating.check_skipped()
    except NonFiniteError as error:
        raise NonFiniteError(f"iteration {solver.iteration}: {error}") from None


def _first_non_finite(solver: Solver) -> Node | None:
    """Where what is not finite began, as far as one device can tell that is about to stop."""
    if solver.keeps_blobs:
        return solver.net.first_non_finite()
    if solver.keep_going or any(layer.communicates() for layer in solver.net.layers):
        return None
    solver.replay.settle()
    try:
        return solver.net.first_non_finite(anew=True)
    except CaffepyError:
        return None  # what stops training is the loss
