"""What a solver says while it trains, in the words of Caffe's `solver.cpp`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from caffepy.net import Net
    from caffepy.solvers.base import Solver


class Display:
    """Shows loss and outputs, averaged over all devices, and the update; every device must call the same methods.

    Args:
        solver: whose.
    """

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    def show_iteration(self) -> None:
        """``Iteration 100 (54 iter/s, 1.85s/100 iters), loss = 0.21`` and a line for each output."""
        solver = self._solver
        blobs = [blob.host_data().astype(np.float64).ravel() for blob in solver.net.outputs.values()]
        values = solver.callback.sum_over_devices(np.concatenate([[solver.losses.mean()], *blobs]))
        values = values / solver.callback.world_size
        rate, seconds = solver.clock.lap(solver.iteration)
        solver.log(
            "Iteration %d (%.6g iter/s, %.6gs/%d iters), loss = %.6g",
            solver.iteration, rate, seconds, solver.param.display, values[0],
        )  # fmt: skip
        for line in output_lines(solver.net, values[1:]):
            solver.log("    Train net output #%s", line)

    def show_loss(self) -> None:
        """``Iteration 1000, loss = 0.21``."""
        solver = self._solver
        values = solver.callback.sum_over_devices(np.array([solver.losses.mean()]))
        solver.log("Iteration %d, loss = %.6g", solver.iteration, values[0] / solver.callback.world_size)

    def show_update(self, due: bool = True) -> None:
        """``Iteration 100, lr = 0.01``, the loss scale and skipped updates where the display is `due`.

        What clipping did is always shown.
        """
        solver = self._solver
        if due:
            solver.log("Iteration %d, lr = %.6g", solver.iteration, solver.numbers.rate)
        norm = solver.updating.clipped()
        if norm is not None:
            limit = solver.param.clip_gradients
            solver.log(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
                norm, limit, limit / norm,
            )  # fmt: skip
        if due and solver.updating.adaptive:
            scale = solver.backend.to_host(solver.updating.loss_scale)
            solver.log("Iteration %d, loss scale = %g", solver.iteration, scale)
        if due:
            self.show_skipped()

    def show_skipped(self) -> None:
        """``Iteration 100, 2 updates skipped since the last display, ...``, if there were any."""
        count = self._solver.updating.newly_skipped()
        if count:
            self._solver.log(
                "Iteration %d, %d update%s skipped since the last display, because gradients were not finite",
                self._solver.iteration, count, "s" * (count > 1),
            )  # fmt: skip


def output_lines(net: Net, values: np.ndarray) -> Iterator[str]:
    """``0: loss = 0.21 (* 1 = 0.21 loss)`` for each element of the outputs, given as one flat array."""
    place = 0
    for name, blob in net.outputs.items():
        weight = net.loss_weight(blob)
        for value in values[place : place + blob.count]:
            share = f" (* {weight:.6g} = {weight * value:.6g} loss)" if weight else ""
            yield f"{place}: {name} = {value:.6g}{share}"
            place += 1
