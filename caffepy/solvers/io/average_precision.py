"""Average precision of detections, as Caffe's `ComputeAP` (`bbox_util.cpp`) computes it in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

Numbers = Any
"""A NumPy array of one axis."""

_EPS = np.float32(1e-6)


def average_precision(scores: Numbers, hits: Numbers, objects: int, version: str) -> float:
    """The average precision of one class.

    Args:
        scores: of the detections; of equal ones the first counts as higher.
        hits: whether each is a hit.
        objects: how many there are to be found; 0 gives 0.
        version: of `ap_version`: "11point" (VOC 2007), "MaxIntegral" (VOC 2012, ILSVRC), or "Integral".
    """
    if not len(scores) or not objects:
        return 0.0
    order = np.argsort(-np.asarray(scores, np.float32), kind="stable")
    found = np.cumsum(np.asarray(hits, bool)[order])
    precision = found.astype(np.float32) / np.arange(1, len(found) + 1, dtype=np.float32)
    recall = found.astype(np.float32) / np.float32(objects)
    return _VERSIONS[version](precision, recall)


def _eleven_points(precision: Numbers, recall: Numbers) -> float:
    """The mean of the best precisions at recalls of at least 0, 0.1, ... 1.

    Caffe goes down from 1 and looks at each detection only until it has passed a point, so that a point may miss a
    better precision at a larger recall; the loop is Caffe's.
    """
    best = np.zeros(11, np.float32)
    end = len(recall)
    for point in range(10, -1, -1):
        begin = int(np.searchsorted(recall[:end].astype(np.float64), point / 10.0))  # below it the recall is smaller
        best[point] = max(best[point], precision[begin:end].max(initial=0))
        if begin > 0:
            end = begin
            if point > 0:
                best[point - 1] = best[point]
    total = np.float32(0)
    for value in best[::-1]:
        total += value / np.float32(11)
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


_VERSIONS = {"11point": _eleven_points, "MaxIntegral": _max_integral, "Integral": _integral}
