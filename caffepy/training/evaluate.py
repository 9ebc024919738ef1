"""Scores of a test net: each batch by one device, sums over all of them (Caffe's `Solver::Test`).

Nets that detect objects are scored by mean average precision (NVIDIA Caffe's `Solver::TestDetection`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from caffepy.backend.types import address
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, StopRequestedError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.layers import Layer
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor
from caffepy.training.callback import SolverCallback
from caffepy.training.display import RootLog, by_name, output_lines

logger = logging.getLogger(__name__)

_OUTPUT, _BATCH, _LABEL, _VALUE, _HIT = range(5)
"""Columns of what is collected: which output, which batch of the test, the class, the detection's score or the number
of objects, and whether the detection is a hit."""
_OBJECTS = -1.0
"""In place of a hit: the row says how many objects of its class the batch has."""
_WIDTH = 5
"""Columns of a DetectionEvaluate layer's top, and of the rows."""

Rows = Any
"""A float64 NumPy array (K, 5)."""
Numbers = Any
"""A NumPy array of one axis."""
_EPS = np.float32(1e-6)


def maker_of(net: Net, output: str) -> Layer:
    """The layer that an output of a net comes from."""
    return [node.layer for node in net.nodes if any(top is net.outputs[output] for top in node.tops)][-1]


def detection_outputs(net: Net) -> list[str]:
    """The outputs that DetectionEvaluate layers make."""
    return [name for name in net.outputs if maker_of(net, name).type == "DetectionEvaluate"]


def check_detection_outputs(net: Net, reason: str) -> None:
    """Check that all outputs of a test net can be scored by average precision.

    Args:
        net: the test net.
        reason: what asks for average precision, for the message.

    Raises:
        ConfigError: one is no DetectionEvaluate layer's.
    """
    for name in net.outputs:
        maker = maker_of(net, name)
        if maker.type != "DetectionEvaluate":
            raise ConfigError(
                f"{reason}, but the test net's output '{name}' is made by layer "
                f"'{maker.name}' ({maker.type}), not by a DetectionEvaluate layer; let a Silence layer take it"
            )


class DetectionScores:
    """Mean average precision of a net's DetectionEvaluate layers.

    Args:
        net: the test net.
        ap_version: how average precision is computed.
        show_classes: whether to log that of each class too.
        log: for lines that only the root shows.
    """

    def __init__(self, net: Net, ap_version: str, show_classes: bool, log: Callable[..., None] = logger.info) -> None:
        self._blobs = {name: net.outputs[name] for name in detection_outputs(net)}
        self._version = ap_version
        self._shows_classes = show_classes
        self._log = log

    def rows(self, batch: int) -> Rows:
        """Return the detections and numbers of objects in the net's outputs, for a batch of this number."""
        found = [np.empty((0, _WIDTH))]
        for index, blob in enumerate(self._blobs.values()):
            values = blob.host_data().reshape(-1, _WIDTH)
            objects = values[:, 0] == -1
            hits, misses = np.trunc(values[:, 3]), np.trunc(values[:, 4])
            # Neither hit nor miss: a detection of an object marked difficult.
            wanted = objects | (hits != 0) | (misses != 0)
            rows = np.empty((len(values), _WIDTH))
            rows[:, _OUTPUT], rows[:, _BATCH], rows[:, _LABEL] = index, batch, np.trunc(values[:, 1])
            rows[:, _VALUE], rows[:, _HIT] = values[:, 2], np.where(objects, _OBJECTS, hits)
            found.append(rows[wanted])
        return np.concatenate(found)

    def means(self, rows: Rows) -> dict[str, np.ndarray]:
        """Return and log the mean average precision of each output; `rows` are those of all batches."""
        means = {}
        for index, name in enumerate(self._blobs):
            mean = self._mean(rows[rows[:, _OUTPUT] == index])
            self._log("Test net output mAP #%d: %s = %.6g", index, name, mean)
            means[name] = np.array(mean)
        return means

    def _mean(self, rows: Rows) -> float:
        """The mean over all classes of an output; a class without objects or detections counts as 0, as in Caffe."""
        is_object = rows[:, _HIT] == _OBJECTS
        total, labels = np.float32(0), np.unique(rows[is_object, _LABEL])
        for label in labels:
            own = rows[:, _LABEL] == label
            objects, found = int(rows[own & is_object, _VALUE].sum()), rows[own & ~is_object]
            value = average_precision(found[:, _VALUE], found[:, _HIT] == 1, objects, self._version)
            total += np.float32(value)
            if not len(found):
                self._log("nothing was detected of class %d", label)
            if self._shows_classes:
                self._log("class AP %d: %.6g", label, value)
        return float(total / np.float32(max(len(labels), 1)))


def gather_rows(
    rows: Sequence[Rows], rank: int, devices: int, sum_over_devices: Callable[[np.ndarray], np.ndarray]
) -> Rows:
    """Return the rows of all devices in the order of the batches, which does not depend on the number of devices.

    Args:
        rows: of this device's batches.
        rank: this device's number among all.
        devices: the number of devices.
        sum_over_devices: the elementwise sum of a float64 array over all devices.
    """
    own = np.concatenate([np.empty((0, _WIDTH)), *rows])
    counts = np.zeros(devices)
    counts[rank] = len(own)
    ends = np.cumsum(sum_over_devices(counts)).astype(np.int64)
    gathered = np.zeros((int(ends[-1]), _WIDTH))
    gathered[ends[rank] - len(own) : ends[rank]] = own
    if len(gathered):
        gathered = sum_over_devices(gathered.ravel()).reshape(-1, _WIDTH)
    return gathered[np.lexsort((gathered[:, _BATCH], gathered[:, _OUTPUT]))]


# -- average precision ---------------------------------------------------------------------------------


def average_precision(scores: Numbers, hits: Numbers, objects: int, version: str) -> float:
    """The average precision of one class, as Caffe's `ComputeAP` (`bbox_util.cpp`) computes it in float32."""
    if not len(scores) or not objects:
        return 0.0
    order = np.argsort(-np.asarray(scores, np.float32), kind="stable")
    found = np.cumsum(np.asarray(hits, bool)[order])
    precision = found.astype(np.float32) / np.arange(1, len(found) + 1, dtype=np.float32)
    recall = found.astype(np.float32) / np.float32(objects)
    return _VERSIONS[version](precision, recall)


def _points(steps: int, precision: Numbers, recall: Numbers) -> float:
    """The mean of the best precisions at recalls of at least 0, 1 / steps, ... 1."""
    # Caffe goes down from 1 and looks at each detection only until it has passed a point, so that a point may miss a
    # better precision at a larger recall; the loop is Caffe's.
    best = np.zeros(steps + 1, np.float32)
    end = len(recall)
    for point in range(steps, -1, -1):
        begin = int(np.searchsorted(recall[:end].astype(np.float64), point / steps))  # below it the recall is smaller
        best[point] = max(best[point], precision[begin:end].max(initial=0))
        if begin > 0:
            end = begin
            if point > 0:
                best[point - 1] = best[point]
    total = np.float32(0)
    for value in best[::-1]:
        total += value / np.float32(steps + 1)
    return float(total)


def _steps(recall: Numbers) -> Numbers:
    """The recall's growth at each detection; what rounding alone makes counts as none."""
    growth = np.abs(np.diff(recall, prepend=np.float32(0)))
    return np.where(growth > _EPS, growth, np.float32(0))


def _integral(precision: Numbers, recall: Numbers) -> float:
    return _sum(precision * _steps(recall))


def _max_integral(precision: Numbers, recall: Numbers) -> float:
    """The same with the best precision at the smaller of both recalls or a larger one."""
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return _sum(np.append((envelope[:-1] * _steps(recall)[1:])[::-1], envelope[0] * recall[0]))


def _sum(terms: Numbers) -> float:
    """In float32, one after the other."""
    return float(np.add.accumulate(terms, dtype=np.float32)[-1])


_VERSIONS: dict[str, Callable[[Numbers, Numbers], float]] = {
    "11point": partial(_points, 10),
    "101point": partial(_points, 100),
    "MaxIntegral": _max_integral,
    "Integral": _integral,
}


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

    def run_all(self, executors: Sequence[ForwardExecutor], iteration: int) -> list[dict[str, np.ndarray]]:
        """The means of each test net, see `run`; of those before the first that was interrupted.

        Args:
            executors: the test nets, in Caffe's order.
            iteration: for the log.
        """
        scores = []
        for index, executor in enumerate(executors):
            self._log("Iteration %d, Testing net (#%d)", iteration, index)
            score = self.run(executor, self._param.test_iter[index])
            if score is None:
                self._log("Test interrupted.")
                break
            scores.append(score)
        return scores

    def run(self, executor: ForwardExecutor, batches: int) -> dict[str, np.ndarray] | None:
        """The means over a whole test of a test net's outputs, by blob name; None if it was interrupted.

        With `eval_type: "detection"` the mean average precision of each. Logs
        ``Test net output #0: accuracy = 0.97``.

        Args:
            executor: runs the test net.
            batches: of the test.

        Raises:
            ConfigError: the outputs cannot be scored as eval_type says.
        """
        detects = self._param.eval_type == "detection"
        scores = self._mean_precisions(executor.net) if detects else MeanScores(executor.net, self._callback, self._log)
        self._share_parameters(executor)
        self._capture_together(executor)
        loss = self._score_own_batches(executor, batches, scores.take)
        if loss is None:
            return None
        self._share_statistics(executor.net)
        if self._param.test_compute_loss:
            mean = self._callback.sum_over_devices(np.array([loss]))[0] / batches
            self._log("Test loss: %.6g", mean)
        return scores.means()

    def _share_parameters(self, executor: ForwardExecutor) -> None:
        """Let the test net use the train net's parameters: a program may have let either share with other nets."""
        net = executor.net
        before = _addresses(net)
        net.share_trained_layers_with(self._train_net)
        if _addresses(net) != before:
            executor.drop()
        executor.parameters_changed()

    def _capture_together(self, executor: ForwardExecutor) -> None:
        """Capture the test net's passes on all devices before any of them goes on, or on none."""
        # Making a graph allocates device memory, which can wait for all work of the process on any device: a collective
        # that another device's solver launches meanwhile could then wait for ever. A device that trains alone
        # captures at the first pass.
        if self._callback.world_size == 1 or not executor.wanted:
            return
        executor.capture()
        if self._callback.min_over_devices(float(executor.wanted), "the capture of all devices' test graphs") == 0:
            executor.stop_capturing()

    def _mean_precisions(self, net: Net) -> MeanPrecisions:
        check_detection_outputs(net, 'solver: eval_type is "detection"')
        scores = DetectionScores(net, self._param.ap_version, self._param.show_per_class_result, self._log)
        return MeanPrecisions(scores, self._callback, self._shard.rank)

    def _score_own_batches(self, executor: ForwardExecutor, batches: int, take: Callable[[int], None]) -> float | None:
        """Run this device's batches and hand each batch's number to `take`; the sum of the losses if they are wanted.

        None if the test was interrupted. Where the root alone scores, the others wait for it after each batch: a wait
        for the whole test could exceed the timeout.
        """
        net, loss = executor.net, 0.0
        shard = net.context.shard
        own = shard.test_batches(batches)
        for batch in range(batches) if shard.undivided else own:
            if batch in own:
                if self._interrupted():
                    return None
                try:
                    executor.forward()
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
