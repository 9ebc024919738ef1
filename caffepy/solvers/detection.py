"""Scores a test net that detects objects by mean average precision (NVIDIA Caffe's `Solver::TestDetection`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from caffepy.errors import ConfigError
from caffepy.layers import Layer
from caffepy.net import Net

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
    """The average precision of one class, as Caffe's `ComputeAP` (`bbox_util.cpp`) computes it in float32.

    Args:
        scores: of the detections; of equal ones the first counts as higher.
        hits: whether each is a hit.
        objects: how many there are to be found; 0 gives 0.
        version: of `ap_version`: "11point" (VOC 2007), "101point" (COCO, in Cascade R-CNN's Caffe),
            "MaxIntegral" (VOC 2012, ILSVRC), or "Integral".
    """
    if not len(scores) or not objects:
        return 0.0
    order = np.argsort(-np.asarray(scores, np.float32), kind="stable")
    found = np.cumsum(np.asarray(hits, bool)[order])
    precision = found.astype(np.float32) / np.arange(1, len(found) + 1, dtype=np.float32)
    recall = found.astype(np.float32) / np.float32(objects)
    return _VERSIONS[version](precision, recall)


def _points(steps: int, precision: Numbers, recall: Numbers) -> float:
    """The mean of the best precisions at recalls of at least 0, 1 / steps, ... 1.

    Caffe goes down from 1 and looks at each detection only until it has passed a point, so that a point may miss a
    better precision at a larger recall; the loop is Caffe's.
    """
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
