"""Which objects prior boxes, or predicted boxes, belong to, and which priors a MultiBoxLoss takes as background.

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
"""In place of an object's number: the box belongs to none, or lies across the image's border and is left out."""
_LEAST = 1e-6
"""Overlaps up to this count as none."""


@dataclass(frozen=True)
class Matching:
    """How boxes are matched.

    Args:
        per_prediction: beside the best box of each object, every box whose overlap with one is large enough.
        threshold: that overlap.
        ignore_crossing: leave out boxes that cross the image's border.
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
    """Each box's largest overlap and the object that it is with; each object's largest overlap and its box."""
    for i in range(count):
        matches[at + i] = nearest[at + i] = UNMATCHED
        overlaps[at + i] = 0
        if begin < end and ignore_crossing and _crosses(boxes, first + i):
            matches[at + i] = IGNORED
            continue
        for j in range(begin, end):
            shared = overlap(boxes, sizes, first + i, objects, object_sizes, j, np.float32(0))
            if shared > _LEAST:
                if shared > overlaps[at + i]:
                    overlaps[at + i] = shared
                    nearest[at + i] = j
                if shared > best[j]:
                    best[j] = shared
                    best_box[j] = i


@device_function
def _next_best(
    boxes: Floats, sizes: Floats, first: Int, count: Int, objects: Floats, object_sizes: Floats, j: Int, at: Int,
    matches: Ints, best: Floats, best_box: Words,
) -> None:  # fmt: skip
    """The largest overlap of object j with a box that is still free, and which box."""
    best[j], best_box[j] = -1, -1
    for i in range(count):
        if matches[at + i] == UNMATCHED:
            shared = overlap(boxes, sizes, first + i, objects, object_sizes, j, np.float32(0))
            if shared > _LEAST and shared > best[j]:
                best[j] = shared
                best_box[j] = i


@device_function
def _strongest(begin: Int, end: Int, best: Floats, best_box: Words) -> Int:
    """The object with the largest overlap of all, -1: none; of equal ones that of the first box, then the first."""
    chosen = -1
    for j in range(begin, end):
        if best_box[j] < 0:
            continue
        if chosen < 0 or best[j] > best[chosen] or (best[j] == best[chosen] and best_box[j] < best_box[chosen]):
            chosen = j
    return chosen


@kernel
def _match(
    start: Int, stop: Int, boxes: Floats, sizes: Floats, firsts: Words, count: Int, objects: Floats,
    object_sizes: Floats, begins: Words, ends: Words, ignore_crossing: Int, per_prediction: Int, threshold: Float,
    matches: Ints, overlaps: Floats, nearest: Ints, best: Floats, best_box: Words,
) -> None:  # fmt: skip
    """Item: a set of boxes and a range of objects."""
    for item in range(start, stop):
        first, begin, end, at = firsts[item], begins[item], ends[item], item * count
        _measure(
            boxes, sizes, first, count, objects, object_sizes, begin, end, ignore_crossing, at, matches, overlaps,
            nearest, best, best_box,
        )  # fmt: skip
        while True:
            j = _strongest(begin, end, best, best_box)
            if j < 0:
                break
            box = best_box[j]
            matches[at + box] = j
            overlaps[at + box] = best[j]
            best_box[j] = -1
            for other in range(begin, end):
                if best_box[other] == box:
                    _next_best(boxes, sizes, first, count, objects, object_sizes, other, at, matches, best, best_box)
        if per_prediction:
            for i in range(count):
                if matches[at + i] == UNMATCHED and nearest[at + i] >= 0 and overlaps[at + i] >= threshold:
                    matches[at + i] = nearest[at + i]


def match_boxes(
    threads: int, boxes: Rows, firsts: NDArray[np.int64], count: int, truth: GroundTruth, begins: NDArray[np.int64],
    ends: NDArray[np.int64], how: Matching,
) -> tuple[NDArray[np.int32], Rows]:  # fmt: skip
    """Match sets of `count` boxes with ranges of objects; T of each.

    Each object first gets the box that it overlaps most, the strongest pair of all first.

    Args:
        threads: how many to use.
        boxes: (..., 4).
        firsts: number of each set's first box (T,).
        count: boxes of a set.
        truth: the objects.
        begins: first object of each range (T,).
        ends: end of each range (T,).
        how: the rules.

    Returns:
        (T, count) each: the object's number, `UNMATCHED` or `IGNORED`; the overlap with it, or the largest overlap.
    """
    assert all(array.flags.c_contiguous for array in (boxes, truth.boxes, truth.sizes, begins, ends))
    shape = (len(firsts), count)
    matches, overlaps = np.empty(shape, np.int32), np.empty(shape, np.float32)
    best, best_box = np.full(len(truth), -1, np.float32), np.full(len(truth), -1, np.int64)
    _match.run(
        threads, len(firsts), 1, boxes, box_sizes(boxes), firsts, count, truth.boxes, truth.sizes, begins, ends,
        int(how.ignore_crossing), int(how.per_prediction), how.threshold, matches, overlaps,
        np.empty(shape, np.int32), best, best_box,
    )  # fmt: skip
    return matches, overlaps


# -- hard negatives ------------------------------------------------------------------------------------


_Parameter = caffe_pb2.MultiBoxLossParameter


@dataclass(frozen=True)
class Mining:
    """How an image's examples are chosen; the fields of MultiBoxLossParameter."""

    hard: bool
    """HARD_EXAMPLE: of all priors the `sample_size` worst. Otherwise background is chosen, `ratio` for each match."""
    ratio: float
    most_overlap: float
    """Priors that overlap an object as much as this are no background."""
    sample_size: int
    nms_threshold: float
    """0: no suppression among the candidates."""
    nms_top_k: int

    @classmethod
    def of(cls, param: caffe_pb2.MultiBoxLossParameter) -> Mining:
        """As the prototxt says."""
        suppresses = param.HasField("nms_param")
        return cls(
            param.mining_type == _Parameter.HARD_EXAMPLE,
            param.neg_pos_ratio,
            param.neg_overlap,
            param.sample_size,
            param.nms_param.nms_threshold if suppresses else 0.0,
            param.nms_param.top_k,
        )

    def choose(
        self, matches: NDArray[np.int32], overlaps: Rows, losses: Rows, boxes: Callable[[], Rows]
    ) -> NDArray[np.intp]:
        """The priors of one image that are taken as background.

        Args:
            matches: of each prior (P,); with HARD_EXAMPLE those that are not taken become `UNMATCHED`.
            overlaps: largest overlap of each (P,).
            losses: of each (P,).
            boxes: gives the boxes (P, 4) that are suppressed where they overlap.
        """
        free = matches == UNMATCHED
        eligible = np.full(len(matches), True) if self.hard else free & (overlaps < np.float32(self.most_overlap))
        candidates = np.flatnonzero(eligible)
        # A loss that is not a number counts as the largest: the loss of the batch will not be one either.
        keys = np.where(np.isnan(losses), np.float32(np.inf), losses)[candidates]
        wanted = min(self._wanted(int((matches >= 0).sum())), len(candidates))
        chosen = candidates[self._best(keys, candidates, boxes)[:wanted]]
        taken = np.zeros(len(matches), bool)
        taken[chosen] = True
        if self.hard:
            matches[(matches >= 0) & ~taken] = UNMATCHED
        return np.flatnonzero(free & taken)

    def _wanted(self, matched: int) -> int:
        if self.hard:
            return self.sample_size
        return int(np.float32(matched) * np.float32(self.ratio))

    def _best(self, keys: Rows, candidates: NDArray[np.intp], boxes: Callable[[], Rows]) -> NDArray[np.int32]:
        """The candidates' indices, the largest key first."""
        if self.nms_threshold > 0:
            return suppress_mined(boxes()[candidates], keys, self.nms_threshold, self.nms_top_k)
        order = np.arange(len(keys), dtype=np.int32)
        sort_like_cpp(np.ascontiguousarray(keys), order)
        return order
