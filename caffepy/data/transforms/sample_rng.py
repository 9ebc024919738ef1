"""The random number generator of one sample's augmentation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import below, more_words, more_words_of

_BLOCKS = 16
"""Blocks of four words per call of `more_words`, whose cost is mostly overhead."""


class SampleRng:
    """A random number generator that depends only on the seed, the layer's stream and the global sample number.

    Its words are disjoint from those of mirroring and cropping (`random.sample_words`).

    Args:
        seed: the solver's seed, or `transform_param.random_seed`.
        stream: the layer's random stream.
        sample: the global sample number.
        words: the first words, if they are known.
    """

    def __init__(self, seed: int, stream: int, sample: int, words: NDArray[np.uint64] | None = None) -> None:
        self._key = (seed, stream, sample)
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64) if words is None else words
        self._next_block = 1 + self._words.size // 4

    def copy(self) -> SampleRng:
        """Return a generator that continues with the same words."""
        other = SampleRng(*self._key, self._words)
        other._next_block = self._next_block
        return other

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` 32-bit words."""
        if self._words.size < count:
            blocks = max(_BLOCKS, -(-(count - self._words.size) // 4))
            more = more_words(*self._key, self._next_block, blocks)
            self._next_block += blocks
            self._words = np.concatenate((self._words, more))
        taken, self._words = self._words[:count], self._words[count:]
        return taken

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit)."""
        return int(self.words(1)[0]) * limit >> 32

    def integers(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return `count` integers in [0, limit)."""
        return below(self.words(count), limit)

    def some(self, rows: NDArray[np.intp], limit: int) -> NDArray[np.intp]:
        """Return at most `limit` of the rows: all of them, or random ones in random order."""
        if len(rows) <= limit:
            return rows
        return rows[np.argsort(self.words(len(rows)), kind="stable")[:limit]]

    def uniform(self, low: float, high: float) -> float:
        """Return a float32 between the bounds."""
        fraction = int(self.words(1)[0]) / 2.0**32
        return float(np.float32(low + (high - low) * fraction))

    def uniforms(self, low: float, high: float, count: int) -> NDArray[np.float32]:
        """Return `count` float32 between the bounds."""
        return (low + (high - low) * (self.words(count) / 2.0**32)).astype(np.float32)


def sample_rngs(seed: int, stream: int, samples: NDArray[np.int64], blocks: int = _BLOCKS) -> list[SampleRng]:
    """Return a generator for each global sample; the first words of all of them are computed together.

    Args:
        seed: as of `SampleRng`.
        stream: as of `SampleRng`.
        samples: global sample numbers.
        blocks: blocks of four words that are computed together.
    """
    words = more_words_of(seed, stream, samples, 1, blocks)
    return [SampleRng(seed, stream, sample, own) for sample, own in zip(samples.tolist(), words, strict=True)]
