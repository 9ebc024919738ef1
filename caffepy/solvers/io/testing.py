"""Scores a test net: each batch of a test by one device, sums over all of them (Caffe's `Solver::Test`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from caffepy.backend.layout import address
from caffepy.data.schedule import TestSchedule
from caffepy.errors import ConfigError, StopRequestedError
from caffepy.net import Net
from caffepy.net.forward_runner import ForwardRunner
from caffepy.solvers.callbacks import Action
from caffepy.solvers.io.detection import DetectionScores, check_detection_outputs, maker_of
from caffepy.solvers.io.display import output_lines
from caffepy.solvers.train_state import TrainState


def run_tests(state: TrainState) -> list[dict[str, np.ndarray]]:
    """The means of each test net, see `run_test`; of those before the first that was interrupted."""
    scores = []
    for index in range(len(state.test_nets)):
        score = run_test(state, index, partial(_interrupted, state))
        if score is None:
            state.log("Test interrupted.")
            break
        scores.append(score)
    return scores


def _interrupted(state: TrainState) -> bool:
    """Whether a test should end at once; devices that train together finish it."""
    if state.callback.world_size > 1:
        return False
    state.requests.poll()
    return Action.STOP in state.requests


def run_test(state: TrainState, index: int, interrupted: Callable[[], bool]) -> dict[str, np.ndarray] | None:
    """The means over a whole test of a test net's outputs, by blob name; None if it was interrupted.

    With `eval_type: "detection"` the mean average precision of each. Every device must call it. Logs
    ``Test net output #0: accuracy = 0.97``.

    Args:
        state: of training.
        index: the test net's.
        interrupted: asked before every batch whether to end at once.

    Raises:
        ConfigError: the outputs cannot be scored as eval_type says.
    """
    runner, detects = state.tests[index], state.param.eval_type == "detection"
    schedule = TestSchedule(state.shard, 1, state.param.test_iter[index])
    state.log("Iteration %d, Testing net (#%d)", state.iteration, index)
    scores = _detection_scores(state, runner.net) if detects else MeanScores(state, runner.net)
    _share_parameters(state, runner)
    _capture_together(state, runner)
    loss = _score_own_batches(state, runner, schedule, interrupted, scores.take)
    if loss is None:
        return None
    if state.param.test_compute_loss:
        mean = state.callback.sum_over_devices(np.array([loss]))[0] / state.param.test_iter[index]
        state.log("Test loss: %.6g", mean)
    return scores.means()


def _share_parameters(state: TrainState, runner: ForwardRunner) -> None:
    """Let the test net use the train net's present parameters: a program may have let either share with other nets."""
    net = runner.net
    before = _addresses(net)
    net.share_trained_layers_with(state.net)
    if _addresses(net) != before:
        runner.drop()
    runner.parameters_changed()


def _addresses(net: Net) -> list[int]:
    """Where the parameters and their copies in other dtypes are."""
    blobs = [blob for layer in net.layers for blob in layer.blobs]
    return [address(array) for blob in blobs for array in (blob.data, *blob.copies.values())]


def _capture_together(state: TrainState, runner: ForwardRunner) -> None:
    """Capture the test net's passes on all devices before any of them goes on, or on none. Alone, it captures itself.

    Making a graph allocates device memory, which can wait for all work of the process on any device: a collective that
    another device's solver launches meanwhile could then wait for ever.
    """
    if state.callback.world_size == 1 or not runner.wanted:
        return
    runner.capture()
    if state.callback.min_over_devices(float(runner.wanted), "the capture of all devices' test graphs") == 0:
        runner.stop_capturing()


def _detection_scores(state: TrainState, net: Net) -> DetectionScores:
    check_detection_outputs(net)
    param = state.param
    shows = param.show_per_class_result
    return DetectionScores(net, param.ap_version, shows, state.callback, state.shard.rank, state.log)


def refuse_changing_outputs(net: Net, names: Iterable[str]) -> None:
    """Check that these outputs have a mean.

    Raises:
        ConfigError: one has another size in each batch.
    """
    for name in names:
        layer = maker_of(net, name)
        if layer.changes_shapes and not layer.may_keep_shapes:
            raise ConfigError(
                f"layer '{layer.name}' ({layer.type}): its top '{name}', an output of the test net, has another size "
                "in each batch and so no mean; score it by a DetectionEvaluate layer and write "
                'eval_type: "detection" in the solver, or let a Silence layer take it'
            )


def _score_own_batches(
    state: TrainState,
    runner: ForwardRunner,
    schedule: TestSchedule,
    interrupted: Callable[[], bool],
    take: Callable[[int], None],
) -> float | None:
    """Run this device's batches and hand each batch's number to `take`; the sum of the losses if they are wanted.

    None if the test was interrupted.
    """
    net, loss = runner.net, 0.0
    for number in range(schedule.passes_per_test):
        if interrupted():
            return None
        try:
            runner.forward()
        except StopRequestedError:
            return None
        take(schedule.first_sample(number))
        loss += net.loss() if state.param.test_compute_loss else 0.0
        net.raise_device_errors()
    return loss


class MeanScores:
    """The means of a test net's outputs over a whole test.

    Args:
        state: of training.
        net: the test net.

    Raises:
        ConfigError: an output has another size in each batch, so that it has no mean.
    """

    def __init__(self, state: TrainState, net: Net) -> None:
        refuse_changing_outputs(net, net.outputs)
        self._state = state
        self._net = net
        self._sums: np.ndarray | None = None
        """Of the first batch's size: a program may have reshaped the inputs since the last test."""
        self._batches = 0

    def take(self, batch: int) -> None:
        """Add the outputs of a batch.

        Raises:
            ConfigError: they have another size than before.
        """
        outputs = [blob.host_data().astype(np.float64).ravel() for blob in self._net.outputs.values()]
        values = np.concatenate([np.empty(0), *outputs])
        sums = np.zeros(values.size) if self._sums is None else self._sums
        if values.size != sums.size:
            raise ConfigError(
                f"the outputs of the test net have {values.size} elements in one batch and {sums.size} in "
                "another, and so no mean; let a Silence layer take those that change"
            )
        self._sums = sums + values
        self._batches += 1

    def means(self) -> dict[str, np.ndarray]:
        """By blob name, over the batches of all devices; logged as well. Every device must call it."""
        own = np.zeros(sum(blob.count for blob in self._net.outputs.values())) if self._sums is None else self._sums
        sums = self._state.callback.sum_over_devices(np.append(own, self._batches))
        means = sums[:-1] / sums[-1]
        for line in output_lines(self._net, means):
            self._state.log("    Test net output #%s", line)
        return self._by_name(means)

    def _by_name(self, values: np.ndarray) -> dict[str, np.ndarray]:
        scores, start = {}, 0
        for name, blob in self._net.outputs.items():
            scores[name] = values[start : start + blob.count].reshape(blob.shape)
            start += blob.count
        return scores
