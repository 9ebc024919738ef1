"""Non-maximum suppression: of boxes that overlap, the best is kept (`bbox_util.cpp`, ApplyNMSFast and ApplyNMS)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, device_function, exact_function, kernel
from caffepy.layers.detection.boxes import Rows, box_sizes, overlap
from caffepy.layers.detection.sorting import best_scores


@dataclass(frozen=True)
class Suppression:
    """How boxes of one class are suppressed.

    Args:
        threshold: overlap above which a box is left out.
        eta: factor on the threshold after each box that is kept, while the threshold is above 0.5.
        top_k: how many of the best boxes are looked at; -1: all.
        least_score: a box must score more.
    """

    threshold: float
    eta: float
    top_k: int
    least_score: float


_FIELDS = 5
"""Numbers of a candidate: its four coordinates and its size."""


@device_function
def _gather(boxes: Floats, sizes: Floats, first: Int, order: Ints, at: Int, found: Int, rows: Floats, row: Int) -> None:
    """Write the candidates order[at: at + found], field by field, behind each other, so that a loop can be wide."""
    for i in range(found):
        number = first + order[at + i]
        for field in range(4):
            rows[row + field * found + i] = boxes[4 * number + field]
        rows[row + 4 * found + i] = sizes[number]


@exact_function
def _raise_overlaps(rows: Floats, row: Int, found: Int, kept: Int, most: Floats, at: Int) -> None:
    """Raise `most` of the candidates behind `kept` to their overlap with it, as `overlap` computes it.

    NaN stays, because what does not compare suppresses in Caffe. Boxes that do not meet have a negative side here.
    """
    left, top = rows[row + kept], rows[row + found + kept]
    right, bottom = rows[row + 2 * found + kept], rows[row + 3 * found + kept]
    size = rows[row + 4 * found + kept]
    for i in range(kept + 1, found):
        own_left, own_top = rows[row + i], rows[row + found + i]
        own_right, own_bottom = rows[row + 2 * found + i], rows[row + 3 * found + i]
        width = (right if right < own_right else own_right) - (left if own_left < left else own_left)
        height = (bottom if bottom < own_bottom else own_bottom) - (top if own_top < top else own_top)
        shared = width * height
        ratio = shared / (rows[row + 4 * found + i] + size - shared)
        value = ratio if (width > 0) & (height > 0) else np.float32(0)
        most[at + i] = value if (value > most[at + i]) | (value != value) else most[at + i]


@device_function
def _suppress(
    rows: Floats, row: Int, order: Ints, at: Int, found: Int, most: Floats, threshold: Float, eta: Float
) -> Int:
    """Keep, in place, those of the candidates order[at: at + found] that no better one suppresses; returns how many."""
    for i in range(found):
        most[at + i] = -1
    kept = 0
    for i in range(found):
        if not most[at + i] <= threshold:
            continue
        order[at + kept] = order[at + i]
        kept += 1
        if eta < 1 and threshold > 0.5:
            threshold = np.float32(threshold * eta)
        _raise_overlaps(rows, row, found, i, most, at)
    return kept


@kernel
def _suppress_classes(
    begin: Int, end: Int, boxes: Floats, sizes: Floats, scores: Floats, classes: Ints, keys: Floats, order: Ints,
    rows: Floats, counts: Ints, chosen: Int, all_classes: Int, priors: Int, loc_classes: Int, limit: Int,
    least_score: Float, threshold: Float, eta: Float,
) -> None:  # fmt: skip
    """Item: (image, class) of boxes (N, L, P, 4), sizes (N, L, P) and scores (N, P, C)."""
    row = begin * _FIELDS * limit
    for item in range(begin, end):
        image = item // chosen
        label = classes[item % chosen]
        first = (image * loc_classes + (label if loc_classes > 1 else 0)) * priors
        start = image * priors * all_classes + label
        at = item * limit
        found = best_scores(scores, start, all_classes, priors, least_score, keys, order, at, limit)
        _gather(boxes, sizes, first, order, at, found, rows, row)
        counts[item] = _suppress(rows, row, order, at, found, keys, threshold, eta)


def suppress_classes(
    threads: int, boxes: Rows, sizes: Rows, scores: Rows, classes: NDArray[np.int32], how: Suppression
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which boxes of each class are kept, the best first: their numbers (N, K, limit), and how many (N, K).

    Args:
        threads: how many to use.
        boxes: (N, L, P, 4); L is 1 if the classes share them.
        sizes: of the boxes, (N, L, P).
        scores: (N, P, C).
        classes: the K classes to look at.
        how: the limits.
    """
    images, priors, all_classes = scores.shape
    limit = priors if how.top_k < 0 else min(how.top_k, priors)
    assert all(array.flags.c_contiguous for array in (boxes, sizes, scores, classes))
    shape = (images, len(classes))
    order, counts = np.empty((*shape, limit), np.int32), np.zeros(shape, np.int32)
    keys, rows = np.empty(order.shape, np.float32), np.empty((counts.size, _FIELDS, limit), np.float32)
    _suppress_classes.run(
        threads, counts.size, 1, boxes, sizes, scores, classes, keys, order, rows, counts, len(classes), all_classes,
        priors, boxes.shape[1], limit, how.least_score, how.threshold, how.eta,
    )  # fmt: skip
    return order, counts


@kernel
def _suppress_mined(
    begin: Int, end: Int, boxes: Floats, sizes: Floats, order: Ints, count: Int, threshold: Float, kept_count: Ints
) -> None:  # fmt: skip
    kept = 0
    for place in range(count):
        number = order[place]
        if sizes[number] < 1e-5:
            continue
        keep = True
        for other in range(kept):
            if overlap(boxes, sizes, order[other], boxes, sizes, number, np.float32(0)) > threshold:
                keep = False
                break
        if keep:
            order[kept] = number
            kept += 1
    kept_count[0] = kept


def suppress_mined(boxes: Rows, scores: Rows, threshold: float, top_k: int) -> NDArray[np.int32]:
    """The numbers of the boxes (n, 4) that are kept, those with the highest scores (n,) first; ApplyNMS.

    Boxes smaller than 1e-5 are left out. Of equal scores the first counts as higher. `top_k` limits how many are looked
    at; -1: all.
    """
    order = np.argsort(-scores, kind="stable").astype(np.int32)
    order = order[:top_k] if top_k > -1 else order
    kept = np.zeros(1, np.int32)
    order, boxes = np.ascontiguousarray(order), np.ascontiguousarray(boxes)
    _suppress_mined.run(1, 1, 1, boxes, box_sizes(boxes), order, len(order), threshold, kept)
    return order[: int(kept[0])]
