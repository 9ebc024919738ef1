"""Scores a test net: each batch of a test by one device, sums over all of them (Caffe's `Solver::Test`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from caffepy.data.schedule import TestSchedule
from caffepy.solvers.io.display import output_lines

if TYPE_CHECKING:
    from caffepy.net import Net
    from caffepy.solvers.base import Solver


def run_test(solver: Solver, index: int) -> dict[str, np.ndarray] | None:
    """The means over a whole test of a test net's outputs, by blob name; None if it was interrupted.

    Every device must call it. Logs ``Test net output #0: accuracy = 0.97``.
    """
    net, batches = solver.test_nets[index], solver.param.test_iter[index]
    solver.log("Iteration %d, Testing net (#%d)", solver.iteration, index)
    sums = _score_own_batches(solver, net, batches)
    if sums is None:
        return None
    means = solver.callback.sum_over_devices(sums) / batches
    if solver.param.test_compute_loss:
        solver.log("Test loss: %.6g", means[0])
    for line in output_lines(net, means[1:]):
        solver.log("    Test net output #%s", line)
    return _by_name(net, means[1:])


def _score_own_batches(solver: Solver, net: Net, batches: int) -> np.ndarray | None:
    """Sums over this device's batches: the loss, then all outputs' elements."""
    sums = np.zeros(1 + sum(blob.count for blob in net.outputs.values()))
    for _ in range(TestSchedule(solver.shard, 1, batches).passes_per_test):
        if solver.interrupted():
            return None
        net.forward()
        outputs = [blob.host_data().astype(np.float64).ravel() for blob in net.outputs.values()]
        loss = net.loss() if solver.param.test_compute_loss else 0.0
        net.raise_device_errors()
        sums += np.concatenate([[loss], *outputs])
    return sums


def _by_name(net: Net, values: np.ndarray) -> dict[str, np.ndarray]:
    scores, place = {}, 0
    for name, blob in net.outputs.items():
        scores[name] = values[place : place + blob.count].reshape(blob.shape)
        place += blob.count
    return scores
