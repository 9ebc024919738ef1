"""Random numbers of one sample, in the order in which its transformations ask for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import below, more_words

_BLOCKS = 16
"""Blocks of four words that are computed at once: the cost of a call is mostly its start."""


class Draws:
    """A sequence of random numbers that depends on the seed, the layer's stream and the global sample alone.

    It does not touch the words that decide mirroring and the place of the crop (`random.sample_words`).

    Args:
        seed: of the solver, or `transform_param.random_seed`.
        stream: of the layer.
        sample: the sample's global number.
    """

    def __init__(self, seed: int, stream: int, sample: int) -> None:
        self._key = (seed, stream, sample)
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._next_block = 1

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` 32-bit words."""
        if self._words.size < count:
            blocks = max(_BLOCKS, -(-(count - self._words.size) // 4))
            more = more_words(*self._key, self._next_block, blocks)
            self._next_block += blocks
            self._words = np.concatenate((self._words, more))
        taken, self._words = self._words[:count], self._words[count:]
        return taken

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self.words(1)[0]) * limit >> 32

    def integers(self, limit: int, count: int) -> NDArray[np.int64]:
        """`count` integers in [0, limit)."""
        return below(self.words(count), limit)

    def uniform(self, low: float, high: float) -> float:
        """A float32 between two bounds; the bound itself where both are the same."""
        return float(self.uniforms(low, high, 1)[0])

    def uniforms(self, low: float, high: float | NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """`count` float32 between bounds; the upper ones may differ."""
        parts = self.words(count).astype(np.float64) / 2.0**32
        return (low + (np.asarray(high, np.float64) - low) * parts).astype(np.float32)
