"""Scores a test net: each batch of a test by one device, sums over all of them (Caffe's `Solver::Test`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from caffepy.backend.layout import address
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError, StopRequestedError
from caffepy.net import Net
from caffepy.net.forward_runner import ForwardRunner
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers.callbacks import SolverCallback
from caffepy.solvers.detection import DetectionScores, Rows, check_detection_outputs, gather_rows, maker_of
from caffepy.solvers.display import RootLog, by_name, output_lines


class Evaluator:
    """Scores a solver's test nets; every device must call the same methods.

    Args:
        param: the solver.
        train_net: whose parameters are tested.
        shard: this device's rank among all.
        callback: the other devices.
        log: for lines that only the root shows.
        interrupted: asked before every batch whether to end at once.
    """

    def __init__(
        self,
        param: SolverParameter,
        train_net: Net,
        shard: Shard,
        callback: SolverCallback,
        log: RootLog,
        interrupted: Callable[[], bool],
    ) -> None:
        self._param = param
        self._train_net = train_net
        self._shard = shard
        self._callback = callback
        self._log = log
        self._interrupted = interrupted

    def run_all(self, runners: Sequence[ForwardRunner], iteration: int) -> list[dict[str, np.ndarray]]:
        """The means of each test net, see `run`; of those before the first that was interrupted.

        Args:
            runners: the test nets, in Caffe's order.
            iteration: for the log.
        """
        scores = []
        for index, runner in enumerate(runners):
            self._log("Iteration %d, Testing net (#%d)", iteration, index)
            score = self.run(runner, self._param.test_iter[index])
            if score is None:
                self._log("Test interrupted.")
                break
            scores.append(score)
        return scores

    def run(self, runner: ForwardRunner, batches: int) -> dict[str, np.ndarray] | None:
        """The means over a whole test of a test net's outputs, by blob name; None if it was interrupted.

        With `eval_type: "detection"` the mean average precision of each. Logs
        ``Test net output #0: accuracy = 0.97``.

        Args:
            runner: runs the test net.
            batches: of the test.

        Raises:
            ConfigError: the outputs cannot be scored as eval_type says.
        """
        detects = self._param.eval_type == "detection"
        scores = self._mean_precisions(runner.net) if detects else MeanScores(runner.net, self._callback, self._log)
        self._share_parameters(runner)
        self._capture_together(runner)
        loss = self._score_own_batches(runner, batches, scores.take)
        if loss is None:
            return None
        self._share_statistics(runner.net)
        if self._param.test_compute_loss:
            mean = self._callback.sum_over_devices(np.array([loss]))[0] / batches
            self._log("Test loss: %.6g", mean)
        return scores.means()

    def _share_parameters(self, runner: ForwardRunner) -> None:
        """Let the test net use the train net's parameters: a program may have let either share with other nets."""
        net = runner.net
        before = _addresses(net)
        net.share_trained_layers_with(self._train_net)
        if _addresses(net) != before:
            runner.drop()
        runner.parameters_changed()

    def _capture_together(self, runner: ForwardRunner) -> None:
        """Capture the test net's passes on all devices before any of them goes on, or on none.

        Making a graph allocates device memory, which can wait for all work of the process on any device: a collective
        that another device's solver launches meanwhile could then wait for ever. A device that trains alone captures at
        the first pass.
        """
        if self._callback.world_size == 1 or not runner.wanted:
            return
        runner.capture()
        if self._callback.min_over_devices(float(runner.wanted), "the capture of all devices' test graphs") == 0:
            runner.stop_capturing()

    def _mean_precisions(self, net: Net) -> MeanPrecisions:
        check_detection_outputs(net, 'solver: eval_type is "detection"')
        scores = DetectionScores(net, self._param.ap_version, self._param.show_per_class_result, self._log)
        return MeanPrecisions(scores, self._callback, self._shard.rank)

    def _score_own_batches(self, runner: ForwardRunner, batches: int, take: Callable[[int], None]) -> float | None:
        """Run this device's batches and hand each batch's number to `take`; the sum of the losses if they are wanted.

        None if the test was interrupted. Where the root alone scores, the others wait for it after each batch: a wait
        for the whole test could exceed the timeout.
        """
        net, loss = runner.net, 0.0
        shard = net.context.shard
        own = shard.test_batches(batches)
        for batch in range(batches) if shard.undivided else own:
            if batch in own:
                if self._interrupted():
                    return None
                try:
                    runner.forward()
                except StopRequestedError:
                    return None
                take(batch)
                loss += net.loss() if self._param.test_compute_loss else 0.0
                net.raise_device_errors()
            if shard.undivided:
                self._callback.barrier()
        return loss

    def _share_statistics(self, net: Net) -> None:
        """Give all devices the running statistics that a test on the root alone has changed (BatchNorm)."""
        if not net.context.shard.undivided:
            return
        for array in (layer.blobs[index].data for layer in net.layers for index in layer.running_statistics()):
            own = np.asarray(net.backend.to_host(array), np.float64) * self._callback.is_root
            net.backend.from_host(self._callback.sum_over_devices(own).astype(np.float32), array)


def _addresses(net: Net) -> list[int]:
    """Where the parameters and their copies in other dtypes are."""
    blobs = [blob for layer in net.layers for blob in layer.blobs]
    return [address(array) for blob in blobs for array in (blob.data, *blob.copies.values())]


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


class MeanScores:
    """The means of a test net's outputs over a whole test.

    Args:
        net: the test net.
        callback: the other devices.
        log: for lines that only the root shows.

    Raises:
        ConfigError: an output has another size in each batch, so that it has no mean.
    """

    def __init__(self, net: Net, callback: SolverCallback, log: RootLog) -> None:
        refuse_changing_outputs(net, net.outputs)
        self._net = net
        self._callback = callback
        self._log = log
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
                "another, and so no mean; let a Silence layer take the outputs that change"
            )
        self._sums = sums + values
        self._batches += 1

    def means(self) -> dict[str, np.ndarray]:
        """By blob name, over the batches of all devices; logged as well. Every device must call it."""
        own = np.zeros(sum(blob.count for blob in self._net.outputs.values())) if self._sums is None else self._sums
        sums = self._callback.sum_over_devices(np.append(own, self._batches))
        means = sums[:-1] / sums[-1]
        for line in output_lines(self._net, means):
            self._log("    Test net output #%s", line)
        return by_name(self._net, means)


class MeanPrecisions:
    """The mean average precisions of a test net's outputs over a whole test.

    Args:
        scores: those of the test net.
        callback: the other devices.
        rank: this device's among them.
    """

    def __init__(self, scores: DetectionScores, callback: SolverCallback, rank: int) -> None:
        self._scores = scores
        self._callback = callback
        self._rank = rank
        self._rows: list[Rows] = []

    def take(self, batch: int) -> None:
        """Collect the detections of a batch of this number."""
        self._rows.append(self._scores.rows(batch))

    def means(self) -> dict[str, np.ndarray]:
        """By blob name, over the batches of all devices; logged as well. Every device must call it."""
        callback = self._callback
        rows = gather_rows(self._rows, self._rank, callback.world_size, callback.sum_over_devices)
        return self._scores.means(rows)
