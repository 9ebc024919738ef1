"""Stops training, or warns, where the loss or too many gradients in a row are not finite; says where that began."""

from __future__ import annotations

import logging
import math

from caffepy.errors import CaffepyError, NonFiniteError
from caffepy.net.wiring import Node
from caffepy.solvers.graph_runner import CudaGraphRunner
from caffepy.solvers.train_state import TrainState

log = logging.getLogger(__name__)


class LossCheck:
    """Checks losses and skipped updates.

    Args:
        state: of training.
        graph_runner: may have put the iteration on the device whose loss is checked.
        keep_going: warn of a loss that is not finite instead of stopping.
        shares_memory: whether blobs that are never needed at the same time share memory.
    """

    def __init__(self, state: TrainState, graph_runner: CudaGraphRunner, keep_going: bool, shares_memory: bool) -> None:
        self._state = state
        self._graph_runner = graph_runner
        self._keep_going = keep_going
        self._shares_memory = shares_memory

    def read(self) -> float:
        """The loss of the train net's last forward pass, checked by `check`; waits for the device."""
        loss = self._state.net.loss()
        self.check(loss)
        return loss

    def check(self, loss: float) -> None:
        """Stop at a loss that is not finite, or warn under `keep_going`.

        Raises:
            NonFiniteError: it is not; the message says where that began.
        """
        if math.isfinite(loss):
            return
        state = self._state
        state.net.raise_device_errors()
        message = f"iteration {state.iteration}: the loss is {loss:g}"
        node = self._first_non_finite()
        if node is not None:
            when = "" if self._keeps_blobs else "in another forward pass "
            message += f"; {when}the first layer whose output is not finite is '{node.layer.name}' ({node.layer.type})"
            if not all(state.backend.all_finite(blob.data) for blob in node.layer.blobs):
                message += ", and its parameters are not finite either"
        if not self._keep_going:
            raise NonFiniteError(f"{message}; lower base_lr, set clip_gradients, or go on with --keep-going")
        log.warning("%s", message)

    def check_skipped(self) -> None:
        """Stop where too many updates in a row were skipped; the device must have nothing left to do.

        Raises:
            NonFiniteError: naming the layer whose gradient overflowed.
        """
        try:
            self._state.update.check_skipped()
        except NonFiniteError as error:
            raise NonFiniteError(f"iteration {self._state.iteration}: {error}") from None

    @property
    def _keeps_blobs(self) -> bool:
        """Whether blobs between the layers hold what they held when the loss was computed."""
        return not (self._graph_runner.captured or self._shares_memory)

    def _first_non_finite(self) -> Node | None:
        """Where what is not finite began, as far as one device can tell that is about to stop."""
        net = self._state.net
        if self._keeps_blobs:
            return net.first_non_finite()
        if self._keep_going or any(layer.communicates() for layer in net.layers):
            return None
        self._graph_runner.drain()
        try:
            return net.first_non_finite(anew=True)
        except CaffepyError:
            return None  # what stops training is the loss
