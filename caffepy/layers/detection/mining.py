"""Which priors a MultiBoxLoss takes as background, or takes at all (MineHardExamples in `bbox_util.cpp`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.matching import UNMATCHED
from caffepy.layers.detection.sorting import sort_like_cpp
from caffepy.layers.detection.suppression import suppress_mined
from caffepy.proto import caffe_pb2

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
