"""The buffer in which the solver threads of a process sum their test scores (NVIDIA Caffe's `SharedScores`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


class SharedScores:
    """One row of scores for each solver thread.

    Not synchronised: callers need a barrier between `save` and `total`.

    Args:
        nranks: the number of threads.
    """

    def __init__(self, nranks: int) -> None:
        self._rows: list[Scores] = [np.zeros(0) for _ in range(nranks)]

    def save(self, rank: int, scores: npt.ArrayLike) -> None:
        """Copy the scores (S,) of thread `rank`."""
        self._rows[rank] = np.array(scores, np.float64)

    def rank_scores(self, rank: int) -> Scores:
        """The last scores that thread `rank` saved."""
        return self._rows[rank]

    def total(self) -> Scores:
        """The sum over all threads, added in rank order."""
        total = np.zeros_like(self._rows[0])
        for row in self._rows:
            assert row.shape == total.shape, (row.shape, total.shape)
            total += row
        return total
