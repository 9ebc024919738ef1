"""Random numbers that a test has chosen, so that it can compute by itself what a transformation makes of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import SampleRng


class ScriptedRng(SampleRng):
    """Gives these parts of the range that is asked for, one after the other; asking for more of them is an error.

    Args:
        parts: from 0 to below 1.
    """

    def __init__(self, parts: Iterable[float]) -> None:
        super().__init__(0, 0, 0)
        self.left = [int(part * 2.0**32) for part in parts]
        """The numbers that nobody has asked for yet."""

    def words(self, count: int) -> NDArray[np.uint64]:
        assert count <= len(self.left), f"{count} random numbers are asked for, and {len(self.left)} are left"
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint64)


class Parts:
    """The same parts for the test's own computation, in float64.

    Args:
        parts: from 0 to below 1.
    """

    def __init__(self, parts: Iterable[float]) -> None:
        self._parts = iter(parts)

    def next(self) -> float:
        """The next one, as a word of 32 bits holds it."""
        return int(next(self._parts) * 2.0**32) / 2.0**32

    def between(self, low: float, high: float) -> float:
        """The next one between two bounds."""
        return low + (high - low) * self.next()
