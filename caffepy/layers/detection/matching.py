"""Matching of boxes with objects, and mining of background priors, for MultiBoxLoss.

`bbox_util.cpp` of SSD's Caffe: MatchBBox, FindMatches, MineHardExamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, device_function, kernel
from caffepy.layers.detection.boxes import Rows, box_sizes, overlap
from caffepy.layers.detection.ground_truth import GroundTruth
from caffepy.layers.detection.sorting import sort_like_cpp
from caffepy.layers.detection.suppression import suppress_mined
from caffepy.proto import caffe_pb2

UNMATCHED, IGNORED = -1, -2
"""In place of an object's index: the box has no object, or crosses the image's border and is ignored."""
_MIN_OVERLAP = 1e-6
"""Overlaps up to this value count as 0."""


@dataclass(frozen=True)
class Matching:
    """The rules of matching.

    Args:
        per_prediction: whether to match, after each object's best box, every box that overlaps an object enough.
        threshold: the overlap that is enough.
        ignore_crossing: whether to ignore boxes that cross the image's border.
    """

    per_prediction: bool
    threshold: float
    ignore_crossing: bool


@device_function
def _crosses(boxes: Floats, number: Int) -> bool:
    for i in range(4):
        if boxes[4 * number + i] < 0 or boxes[4 * number + i] > 1:
            return True
    return False


@device_function
def _measure(
    boxes: Floats, sizes: Floats, first: Int, count: Int, objects: Floats, object_sizes: Floats, begin: Int, end: Int,
    ignore_crossing: Int, at: Int, matches: Ints, overlaps: Floats, nearest: Ints, best: Floats, best_box: Words,
) -> None:  # fmt: skip
    """Compute the largest overlap of each box and its object, and the largest overlap of each object and its box."""
    for i in range(count):
        matches[at + i] = nearest[at + i] = UNMATCHED
        overlaps[at + i] = 0
        if begin < end and ignore_crossing and _crosses(boxes, first + i):
            matches[at + i] = IGNORED
            continue
        for j in range(begin, end):
            shared = overlap(boxes, sizes, first + i, objects, object_sizes, j, np.float32(0))
            if shared > _MIN_OVERLAP:
                if shared > overlaps[at + i]:
                    overlaps[at + i] = shared
                    nearest[at + i] = j
                if shared > best[j]:
                    best[j] = shared
                    best_box[j] = i


@device_function
def _best_free_box(
    boxes: Floats, sizes: Floats, first: Int, count: Int, objects: Floats, object_sizes: Floats, j: Int, at: Int,
    matches: Ints, best: Floats, best_box: Words,
) -> None:  # fmt: skip
    """Find the unmatched box with the largest overlap with object j."""
    best[j], best_box[j] = -1, -1
    for i in range(count):
        if matches[at + i] == UNMATCHED:
            shared = overlap(boxes, sizes, first + i, objects, object_sizes, j, np.float32(0))
            if shared > _MIN_OVERLAP and shared > best[j]:
                best[j] = shared
                best_box[j] = i


@device_function
def _best_object(begin: Int, end: Int, best: Floats, best_box: Words) -> Int:
    """Return the object with the largest overlap, or -1. On ties the first box wins, then the first object."""
    selected = -1
    for j in range(begin, end):
        if best_box[j] < 0:
            continue
        if selected < 0 or best[j] > best[selected] or (best[j] == best[selected] and best_box[j] < best_box[selected]):
            selected = j
    return selected


@kernel
def _match(
    start: Int, stop: Int, boxes: Floats, sizes: Floats, firsts: Words, count: Int, objects: Floats,
    object_sizes: Floats, begins: Words, ends: Words, ignore_crossing: Int, per_prediction: Int, threshold: Float,
    matches: Ints, overlaps: Floats, nearest: Ints, best: Floats, best_box: Words,
) -> None:  # fmt: skip
    """An item is a set of boxes and a range of objects."""
    for item in range(start, stop):
        first, begin, end, at = firsts[item], begins[item], ends[item], item * count
        _measure(
            boxes, sizes, first, count, objects, object_sizes, begin, end, ignore_crossing, at, matches, overlaps,
            nearest, best, best_box,
        )  # fmt: skip
        while True:
            j = _best_object(begin, end, best, best_box)
            if j < 0:
                break
            box = best_box[j]
            matches[at + box] = j
            overlaps[at + box] = best[j]
            best_box[j] = -1
            for other in range(begin, end):
                if best_box[other] == box:
                    _best_free_box(
                        boxes, sizes, first, count, objects, object_sizes, other, at, matches, best, best_box
                    )
        if per_prediction:
            for i in range(count):
                if matches[at + i] == UNMATCHED and nearest[at + i] >= 0 and overlaps[at + i] >= threshold:
                    matches[at + i] = nearest[at + i]


def match_boxes(
    threads: int, boxes: Rows, firsts: NDArray[np.int64], count: int, truth: GroundTruth, begins: NDArray[np.int64],
    ends: NDArray[np.int64], rules: Matching,
) -> tuple[NDArray[np.int32], Rows]:  # fmt: skip
    """Match T sets of `count` boxes with T ranges of objects.

    Greedy: the pair of box and object with the largest overlap is matched first, until each object has a box.

    Args:
        threads: number of threads.
        boxes: (..., 4).
        firsts: index of each set's first box (T,).
        count: boxes of a set.
        truth: the objects.
        begins: first object of each range (T,).
        ends: end of each range (T,).
        rules: of the matching.

    Returns:
        (T, count) each: the object's index, `UNMATCHED` or `IGNORED`; the overlap with it, or the largest overlap.
    """
    assert all(array.flags.c_contiguous for array in (boxes, truth.boxes, truth.sizes, begins, ends))
    shape = (len(firsts), count)
    matches, overlaps = np.empty(shape, np.int32), np.empty(shape, np.float32)
    best, best_box = np.full(len(truth), -1, np.float32), np.full(len(truth), -1, np.int64)
    _match.run(
        threads, len(firsts), 1, boxes, box_sizes(boxes), firsts, count, truth.boxes, truth.sizes, begins, ends,
        int(rules.ignore_crossing), int(rules.per_prediction), rules.threshold, matches, overlaps,
        np.empty(shape, np.int32), best, best_box,
    )  # fmt: skip
    return matches, overlaps


# -- hard negatives ------------------------------------------------------------------------------------


_Parameter = caffe_pb2.MultiBoxLossParameter


@dataclass(frozen=True)
class Mining:
    """Selection of an image's background priors, by the fields of MultiBoxLossParameter."""

    hard: bool
    """HARD_EXAMPLE: the `sample_size` priors with the largest losses. Else `ratio` background priors for each match."""
    ratio: float
    max_overlap: float
    """Priors with at least this overlap with an object are not background."""
    sample_size: int
    nms_threshold: float
    """Of the suppression among the candidates; 0: none."""
    nms_top_k: int

    @classmethod
    def of(cls, param: caffe_pb2.MultiBoxLossParameter) -> Mining:
        """Return the settings of the prototxt."""
        suppresses = param.HasField("nms_param")
        return cls(
            param.mining_type == _Parameter.HARD_EXAMPLE,
            param.neg_pos_ratio,
            param.neg_overlap,
            param.sample_size,
            param.nms_param.nms_threshold if suppresses else 0.0,
            param.nms_param.top_k,
        )

    def select(
        self, matches: NDArray[np.int32], overlaps: Rows, losses: Rows, boxes: Callable[[], Rows]
    ) -> NDArray[np.intp]:
        """Return the indices of one image's background priors.

        Args:
            matches: of each prior (P,). With HARD_EXAMPLE, matched priors that are not mined become `UNMATCHED`.
            overlaps: largest overlap of each prior (P,).
            losses: of each prior (P,).
            boxes: returns the boxes (P, 4) for the suppression.
        """
        free = matches == UNMATCHED
        eligible = np.full(len(matches), True) if self.hard else free & (overlaps < np.float32(self.max_overlap))
        candidates = np.flatnonzero(eligible)
        # NaN counts as the largest loss: the loss of the batch becomes NaN too.
        keys = np.where(np.isnan(losses), np.float32(np.inf), losses)[candidates]
        count = min(self._quota(int((matches >= 0).sum())), len(candidates))
        selected = candidates[self._ranked(keys, candidates, boxes)[:count]]
        mined = np.zeros(len(matches), bool)
        mined[selected] = True
        if self.hard:
            matches[(matches >= 0) & ~mined] = UNMATCHED
        return np.flatnonzero(free & mined)

    def _quota(self, matched: int) -> int:
        if self.hard:
            return self.sample_size
        return int(np.float32(matched) * np.float32(self.ratio))

    def _ranked(self, keys: Rows, candidates: NDArray[np.intp], boxes: Callable[[], Rows]) -> NDArray[np.int32]:
        """Return the candidates' indices in descending order of keys."""
        if self.nms_threshold > 0:
            return suppress_mined(boxes()[candidates], keys, self.nms_threshold, self.nms_top_k)
        order = np.arange(len(keys), dtype=np.int32)
        sort_like_cpp(np.ascontiguousarray(keys), order)
        return order
