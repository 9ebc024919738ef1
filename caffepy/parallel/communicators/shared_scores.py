"""The buffer through which solver threads of a process hand each other test scores (NVIDIA Caffe's `SharedScores`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


class SharedScores:
    """One row of scores for each solver thread.

    It does not synchronise: whoever shares it puts a barrier between `save` and `total`.

    Args:
        nranks: how many threads share it.
    """

    def __init__(self, nranks: int) -> None:
        self._rows: list[Scores] = [np.zeros(0) for _ in range(nranks)]

    def save(self, rank: int, scores: npt.ArrayLike) -> None:
        """Keep a copy of the scores (S,) of thread `rank`."""
        self._rows[rank] = np.array(scores, np.float64)

    def rank_scores(self, rank: int) -> Scores:
        """What thread `rank` saved last."""
        return self._rows[rank]

    def total(self) -> Scores:
        """The sum over all threads, in the order of the ranks."""
        total = np.zeros_like(self._rows[0])
        for row in self._rows:
            assert row.shape == total.shape, (row.shape, total.shape)
            total += row
        return total
