"""The log lines of training, in the words of Caffe's `solver.cpp`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from caffepy.net import Net
from caffepy.solvers.clock import Clock
from caffepy.solvers.hyperparameters import Hyperparameters
from caffepy.solvers.train_state import TrainState


class Display:
    """Shows loss and outputs, averaged over all devices, and the update; every device must call the same methods.

    Args:
        state: of training.
        clock: gives the seconds between two displays.
        hyperparameters: gives the learning rate.
    """

    def __init__(self, state: TrainState, clock: Clock, hyperparameters: Hyperparameters) -> None:
        self._state = state
        self._clock = clock
        self._hyperparameters = hyperparameters

    def show_iteration(self) -> None:
        """``Iteration 100 (54 iter/s, 1.85s/100 iters), loss = 0.21`` and a line for each output."""
        state = self._state
        blobs = [blob.host_data().astype(np.float64).ravel() for blob in state.net.outputs.values()]
        values = state.callback.sum_over_devices(np.concatenate([[state.losses.mean()], *blobs]))
        values = values / state.callback.world_size
        rate, seconds = self._clock.lap(state.iteration)
        state.log(
            "Iteration %d (%.6g iter/s, %.6gs/%d iters), loss = %.6g",
            state.iteration, rate, seconds, state.param.display, values[0],
        )  # fmt: skip
        for line in output_lines(state.net, values[1:]):
            state.log("    Train net output #%s", line)

    def show_loss(self) -> None:
        """``Iteration 1000, loss = 0.21``."""
        state = self._state
        values = state.callback.sum_over_devices(np.array([state.losses.mean()]))
        state.log("Iteration %d, loss = %.6g", state.iteration, values[0] / state.callback.world_size)

    def show_update(self, due: bool = True) -> None:
        """``Iteration 100, lr = 0.01`` and skipped updates where the display is `due`.

        What clipping did is always shown.
        """
        state = self._state
        if due:
            self._show_rate()
        norm = state.update.clipped()
        if norm is not None:
            limit = state.param.clip_gradients
            state.log(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
                norm, limit, limit / norm,
            )  # fmt: skip
        if due:
            self.show_skipped()

    def _show_rate(self) -> None:
        """The learning rate, in the words of the net's dialect, so that the dialect's log parsers read it.

        BVLC's `sgd_solver.cpp` prints the rate alone: its parse_log.sh takes the line's ninth word, where a comma would
        be part of the number. NVIDIA's PrintRate adds the momentum, the rate that both amount to, the weight decay and
        the loss scale.
        """
        state, values = self._state, self._hyperparameters
        if not state.net.context.nvidia:
            state.log("Iteration %d, lr = %.6g", state.iteration, values.rate)
            return
        amounts_to = values.rate / (1 - values.momentum) if values.momentum < 1 else np.inf
        scale = float(state.backend.to_host(state.update.loss_scale))
        state.log(
            "Iteration %d, lr = %.6g, m = %.6g, lrm = %.6g, wd = %.6g, gs = %.6g",
            state.iteration, values.rate, values.momentum, amounts_to, values.weight_decay, scale,
        )  # fmt: skip

    def show_skipped(self) -> None:
        """``Iteration 100, 2 updates skipped since the last display, ...``, if there were any."""
        count = self._state.update.newly_skipped()
        if count:
            self._state.log(
                "Iteration %d, %d update%s skipped since the last display, because gradients were not finite",
                self._state.iteration, count, "s" * (count > 1),
            )  # fmt: skip


def output_lines(net: Net, values: np.ndarray) -> Iterator[str]:
    """``0: loss = 0.21 (* 1 = 0.21 loss)`` for each element of the outputs, given as one flat array."""
    index = 0
    for name, blob in net.outputs.items():
        weight = net.loss_weight(blob)
        for value in values[index : index + blob.count]:
            share = f" (* {weight:.6g} = {weight * value:.6g} loss)" if weight else ""
            yield f"{index}: {name} = {value:.6g}{share}"
            index += 1
