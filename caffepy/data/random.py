"""Counter-based random words for data: which way to mirror, where to crop, in which order to read.

Owns the host's Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). A word is a
function of the key and the counter alone, so what happens to a sample depends neither on the thread, rank or device
that prepares it nor on what was prepared before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
SAMPLE_WORDS, _ORDER_WORDS, _SKIP_WORDS = 0, 1, 2
"""The last word of the counter, which keeps the uses of one stream apart."""


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox 4x32-10 of many counters at once.

    Args:
        counter: (4, N), each element a 32-bit word.
        key: two 32-bit words.

    Returns:
        (4, N) random 32-bit words, held as uint64.
    """
    x0, x1, x2, x3 = counter
    for turn in range(10):
        k0, k1 = (np.uint64((key[i] + turn * _WEYL[i]) & 0xFFFFFFFF) for i in (0, 1))
        first, second = x0 * np.uint64(_MULTIPLIERS[0]), x2 * np.uint64(_MULTIPLIERS[1])
        x0, x1, x2, x3 = (second >> _HALF) ^ x1 ^ k0, second & _LOW, (first >> _HALF) ^ x3 ^ k1, first & _LOW
    return np.stack((x0, x1, x2, x3))


def key_of(seed: int, stream: int) -> tuple[int, int]:
    """The key of a stream: two 32-bit words."""
    return (seed ^ stream) & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _words(seed: int, stream: int, low: NDArray[np.uint64], middle: NDArray[np.uint64], use: int) -> NDArray[np.uint64]:
    """Words of one stream at the counters (low, middle's low half, middle's high half, use)."""
    counter = np.empty((4, max(low.size, middle.size)), np.uint64)
    counter[0], counter[1], counter[2], counter[3] = low, middle & _LOW, middle >> _HALF, use
    return philox(counter, key_of(seed, stream))


def sample_words(seed: int, stream: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each of some global samples: shape (4, N)."""
    return _words(seed, stream, np.zeros(1, np.uint64), samples.astype(np.uint64), SAMPLE_WORDS)


def more_words(seed: int, stream: int, sample: int, first: int, blocks: int) -> NDArray[np.uint64]:
    """Further random 32-bit words of one global sample, beyond those of `sample_words`.

    Args:
        seed: of the solver.
        stream: of the layer.
        sample: its global number.
        first: the first block of four words, from 1 on.
        blocks: how many blocks.

    Returns:
        4 * blocks words.
    """
    low = np.arange(first, first + blocks, dtype=np.uint64)
    words = _words(seed, stream, low, np.array([sample], np.uint64), SAMPLE_WORDS)
    return np.ascontiguousarray(words.T).reshape(-1)


def below(words: NDArray[np.uint64], limit: int | NDArray[np.uint64]) -> NDArray[np.int64]:
    """Random words (32 bits) as integers in [0, limit)."""
    scaled: NDArray[np.uint64] = (words * np.asarray(limit, np.uint64)) >> _HALF
    return scaled.astype(np.int64)


def permutation(seed: int, stream: int, epoch: int, length: int) -> NDArray[np.int64]:
    """A random order of `length` records, another one in each epoch.

    It is the order of 64-bit random keys, so it depends on no library's generator.
    """
    numbers = np.arange(length, dtype=np.uint64)
    words = _words(seed, stream, numbers, np.array([epoch], np.uint64), _ORDER_WORDS)
    return np.argsort((words[0] << _HALF) | words[1], kind="stable")


def skip(seed: int, stream: int, limit: int) -> int:
    """How many records `rand_skip: limit` passes over at the start: in [0, limit), the same on every device."""
    word = _words(seed, stream, np.zeros(1, np.uint64), np.zeros(1, np.uint64), _SKIP_WORDS)[0]
    return int(below(word, limit)[0])
