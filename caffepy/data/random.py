"""Counter-based random numbers for data: mirroring, crop offsets, record order.

The host's Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). A random word depends
only on the key and the counter. Therefore a sample's augmentation does not depend on the thread, rank or device
that prepares it, or on the order of preparation.
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
    """Return further random 32-bit words of one global sample, beyond those of `sample_words`.

    Args:
        seed: the solver's seed.
        stream: the layer's random stream.
        sample: its global number.
        first: number of the first block of four words, from 1.
        blocks: number of blocks.

    Returns:
        4 * blocks words.
    """
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
