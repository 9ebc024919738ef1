"""Counter-based random numbers for data: mirroring, crop offsets, record order.

The host's Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). A random word depends
only on the key and the counter. Therefore a sample's augmentation does not depend on the thread, rank or device
that prepares it, or on the order of preparation.

The random number generator of one sample's augmentation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
SAMPLE_WORDS, _ORDER_WORDS, _SKIP_WORDS = 0, 1, 2
"""Last word of the counter: separates the uses of one stream."""


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Return Philox 4x32-10 of N counters.

    Args:
        counter: (4, N), each element a 32-bit word.
        key: two 32-bit words.

    Returns:
        (4, N) random 32-bit words, held as uint64.
    """
    x0, x1, x2, x3 = counter
    for round_ in range(10):
        k0, k1 = (np.uint64((key[i] + round_ * _WEYL[i]) & 0xFFFFFFFF) for i in (0, 1))
        first, second = x0 * np.uint64(_MULTIPLIERS[0]), x2 * np.uint64(_MULTIPLIERS[1])
        x0, x1, x2, x3 = (second >> _SHIFT) ^ x1 ^ k0, second & _LOW, (first >> _SHIFT) ^ x3 ^ k1, first & _LOW
    return np.stack((x0, x1, x2, x3))


def key_of(seed: int, stream: int) -> tuple[int, int]:
    """Return the Philox key of a stream: two 32-bit words."""
    return (seed ^ stream) & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _words(seed: int, stream: int, low: NDArray[np.uint64], middle: NDArray[np.uint64], use: int) -> NDArray[np.uint64]:
    """Return the words of a stream at the counters (low, lower half of middle, upper half of middle, use)."""
    counter = np.empty((4, max(low.size, middle.size)), np.uint64)
    counter[0], counter[1], counter[2], counter[3] = low, middle & _LOW, middle >> _SHIFT, use
    return philox(counter, key_of(seed, stream))


def sample_words(seed: int, stream: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return four random 32-bit words for each global sample: shape (4, N)."""
    return _words(seed, stream, np.zeros(1, np.uint64), samples.astype(np.uint64), SAMPLE_WORDS)


def more_words(seed: int, stream: int, sample: int, first: int, blocks: int) -> NDArray[np.uint64]:
    """Return further random 32-bit words of one global sample, beyond those of `sample_words`."""
    words: NDArray[np.uint64] = more_words_of(seed, stream, np.array([sample]), first, blocks)[0]
    return words


def more_words_of(seed: int, stream: int, samples: NDArray[np.int64], first: int, blocks: int) -> NDArray[np.uint64]:
    """Return `more_words` of several global samples: (N, 4 * blocks)."""
    low = np.tile(np.arange(first, first + blocks, dtype=np.uint64), samples.size)
    words = _words(seed, stream, low, np.repeat(samples.astype(np.uint64), blocks), SAMPLE_WORDS)
    return np.ascontiguousarray(words.T).reshape(samples.size, 4 * blocks)


def below(words: NDArray[np.uint64], limit: int | NDArray[np.uint64]) -> NDArray[np.int64]:
    """Scale random 32-bit words to integers in [0, limit)."""
    scaled: NDArray[np.uint64] = (words * np.asarray(limit, np.uint64)) >> _SHIFT
    return scaled.astype(np.int64)


def permutation(seed: int, stream: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return the random permutation of `length` records for an epoch.

    It sorts 64-bit random keys, so it does not depend on a library's generator.
    """
    numbers = np.arange(length, dtype=np.uint64)
    words = _words(seed, stream, numbers, np.array([epoch], np.uint64), _ORDER_WORDS)
    return np.argsort((words[0] << _SHIFT) | words[1], kind="stable")


def rand_skip_count(seed: int, stream: int, limit: int) -> int:
    """Return the records that `rand_skip: limit` skips at the start: in [0, limit), equal on all devices."""
    word = _words(seed, stream, np.zeros(1, np.uint64), np.zeros(1, np.uint64), _SKIP_WORDS)[0]
    return int(below(word, limit)[0])


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
