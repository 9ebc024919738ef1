"""Scores a test net: each batch of a test by one device, sums over all of them (Caffe's `Solver::Test`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from caffepy.data.schedule import TestSchedule
from caffepy.errors import StopRequestedError
from caffepy.net import Net
from caffepy.solvers.io.display import output_lines
from caffepy.solvers.train_state import TrainState


def run_test(state: TrainState, index: int, interrupted: Callable[[], bool]) -> dict[str, np.ndarray] | None:
    """The means over a whole test of a test net's outputs, by blob name; None if it was interrupted.

    Every device must call it. Logs ``Test net output #0: accuracy = 0.97``.

    Args:
        state: of training.
        index: the test net's.
        interrupted: asked before every batch whether to end at once.
    """
    net, batches = state.test_nets[index], state.param.test_iter[index]
    state.log("Iteration %d, Testing net (#%d)", state.iteration, index)
    sums = _score_own_batches(state, net, batches, interrupted)
    if sums is None:
        return None
    means = state.callback.sum_over_devices(sums) / batches
    if state.param.test_compute_loss:
        state.log("Test loss: %.6g", means[0])
    for line in output_lines(net, means[1:]):
        state.log("    Test net output #%s", line)
    return _by_name(net, means[1:])


def _score_own_batches(state: TrainState, net: Net, batches: int, interrupted: Callable[[], bool]) -> np.ndarray | None:
    """Sums over this device's batches: the loss, then all outputs' elements."""
    sums = np.zeros(1 + sum(blob.count for blob in net.outputs.values()))
    for _ in range(TestSchedule(state.shard, 1, batches).passes_per_test):
        if interrupted():
            return None
        try:
            net.forward()
        except StopRequestedError:
            return None
        outputs = [blob.host_data().astype(np.float64).ravel() for blob in net.outputs.values()]
        loss = net.loss() if state.param.test_compute_loss else 0.0
        net.raise_device_errors()
        sums += np.concatenate([[loss], *outputs])
    return sums


def _by_name(net: Net, values: np.ndarray) -> dict[str, np.ndarray]:
    scores, start = {}, 0
    for name, blob in net.outputs.items():
        scores[name] = values[start : start + blob.count].reshape(blob.shape)
        start += blob.count
    return scores
