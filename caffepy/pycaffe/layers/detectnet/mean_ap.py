"""Precision and recall of DetectNet's lists of boxes: `caffe.layers.detectnet.mean_ap` of NVIDIA Caffe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.layers.python import PythonLayerBase

MAX_BOXES = 50
MATCH = 0.7
"""Overlap from which on a box has found an object."""
FOUND, WRONG, MISSED = 1, 2, 3
"""The fifth column of scored boxes: a box that found an object, one that found none, an object without a box."""


class ScoreDetections(PythonLayerBase):
    """Bottoms: objects and boxes (N, MAX_BOXES, 5). Top: boxes and missed objects with their score in column five.

    Each object, in order, takes the first free box that overlaps it by 0.7. Rows of zeros count as none.
    """

    def setup(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        """There is no setting."""

    def reshape(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        if bottom[0].shape[0] != bottom[1].shape[0]:
            raise ValueError(f"there are objects of {bottom[0].shape[0]} images and boxes of {bottom[1].shape[0]}")
        top[0].reshape(bottom[0].shape[0], MAX_BOXES, 5)

    def forward(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        top[0].data[...] = score_det(bottom[0].data, bottom[1].data)

    def backward(self, top: Sequence[Any], propagate_down: list[bool], bottom: Sequence[Any]) -> None:
        """Scores have no gradient."""


class mAP(PythonLayerBase):  # noqa: N801 -- NVIDIA's name
    """Bottom: scored boxes. Tops: precision * recall / 100, precision and recall in percent, (1,) each."""

    def setup(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        """`param_str` is not read."""

    def reshape(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        for blob in top:
            blob.reshape(1)

    def forward(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        scores = bottom[0].data[:, :, 4]
        found, wrong, missed = (int((scores == kind).sum()) for kind in (FOUND, WRONG, MISSED))
        precision, recall = (100 * divide_zero_is_zero(found, found + others) for others in (wrong, missed))
        for blob, value in zip(top, (precision * recall / 100, precision, recall), strict=True):
            blob.data[...] = value

    def backward(self, top: Sequence[Any], propagate_down: list[bool], bottom: Sequence[Any]) -> None:
        """Counts have no gradient."""


def iou(det: Any, rhs: Any) -> float:
    """Return the intersection over union of two boxes (x1, y1, x2, y2)."""
    width, height = min(det[2], rhs[2]) - max(det[0], rhs[0]), min(det[3], rhs[3]) - max(det[1], rhs[1])
    if width <= 0 or height <= 0:
        return 0.0
    total = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (det, rhs))
    return float(width * height / (total - width * height))


def divide_zero_is_zero(a: float, b: float) -> float:
    """Return a / b, 0 if b is 0."""
    return a / b if b else 0.0


def score_det(gt_bbox_list: Any, det_bbox_list: Any) -> Any:
    """Return the scored boxes of each image (N, MAX_BOXES, 5): found, wrong, then missed; at most MAX_BOXES."""
    scored = np.zeros((len(gt_bbox_list), MAX_BOXES, 5))
    for rows, *lists in zip(scored, gt_bbox_list, det_bbox_list, strict=True):
        objects, boxes = (values[values[:, :4].any(1), :4] for values in lists)
        taken, missed = np.zeros(len(boxes), bool), np.ones(len(objects), bool)
        for number, one in enumerate(objects):
            free = [i for i, box in enumerate(boxes) if not taken[i] and iou(box, one) >= MATCH]
            if free:
                taken[free[0]], missed[number] = True, False
        parts = ((boxes[taken], FOUND), (boxes[~taken], WRONG), (objects[missed], MISSED))
        result = np.concatenate([np.insert(part, 4, kind, 1) for part, kind in parts])[:MAX_BOXES]
        rows[: len(result)] = result
    return scored
