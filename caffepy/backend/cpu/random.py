"""Counter-based random numbers: Philox 4x32-10 (Salmon et al.: Parallel random numbers: as easy as 1, 2, 3, SC11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Floats, Int, device_function, kernel, note_host_work
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import RandomPrimitives
from caffepy.backend.types import Array, Counter, RandomStream, channels_and_pixels

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
# A float32 has 24 digits. More would round the largest words to 1, which lies outside [0, 1).
_DROPPED = np.uint64(8)
_SCALE = np.float32(2.0**-24)


@device_function
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Return ten rounds on a counter of four words with a key of two; 32-bit words held as uint64."""
    for _ in range(10):
        p0 = _M0 * c0
        p1 = _M1 * c2
        c0 = ((p1 >> _SHIFT) ^ c1 ^ k0) & _WORD
        c2 = ((p0 >> _SHIFT) ^ c3 ^ k1) & _WORD
        c1 = p1 & _WORD
        c3 = p0 & _WORD
        k0 = (k0 + _W0) & _WORD
        k1 = (k1 + _W1) & _WORD
    return c0, c1, c2, c3


@device_function
def fraction(word: Any) -> Any:
    """Return the upper 24 bits of a word as a number in [0, 1)."""
    return np.float32(np.int32(word >> _DROPPED)) * _SCALE


@kernel
def uniform(
    begin: Int,
    end: Int,
    out: Floats,
    count: Int,
    pixels: Int,
    channels: Int,
    quads: Int,
    first_sample: Int,
    pass_number: Int,
    key0: Int,
    key1: Int,
) -> None:
    """Items are (sample, four elements); element i = c * pixels + p lies at p * channels + c."""
    for item in range(begin, end):
        row = item // quads
        quad = item % quads
        sample = np.uint64(first_sample + row)
        words = philox(
            np.uint64(quad),
            sample & _WORD,
            sample >> _SHIFT,
            np.uint64(pass_number) & _WORD,
            np.uint64(key0),
            np.uint64(key1),
        )
        for j in range(min(4, count - 4 * quad)):
            i = 4 * quad + j
            at = i if channels == 1 or pixels == 1 else (i % pixels) * channels + i // pixels
            word = words[0]
            if j == 1:
                word = words[1]
            elif j == 2:
                word = words[2]
            elif j == 3:
                word = words[3]
            out[row * count + at] = fraction(word)


@kernel
def uniform_images(
    begin: Int,
    end: Int,
    out: Floats,
    pixels: Int,
    channels: Int,
    first_sample: Int,
    pass_number: Int,
    key0: Int,
    key1: Int,
) -> None:
    """As `uniform` for images of 4 n pixels. Items are (sample, four pixels); channels are vectorised."""
    quads = pixels // 4
    for item in range(begin, end):
        row = item // quads
        quad = item % quads
        sample = np.uint64(first_sample + row)
        low, high, number = sample & _WORD, sample >> _SHIFT, np.uint64(pass_number) & _WORD
        at = (row * pixels + 4 * quad) * channels
        for c in range(channels):
            # Four consecutive elements in logical order share a call. Since a channel has 4 n pixels, they are four
            # pixels of one channel, and the numbers are those of `uniform` although memory has the channels next to
            # each other.
            words = philox(np.uint64(c * quads + quad), low, high, number, np.uint64(key0), np.uint64(key1))
            out[at + c] = fraction(words[0])
            out[at + channels + c] = fraction(words[1])
            out[at + 2 * channels + c] = fraction(words[2])
            out[at + 3 * channels + c] = fraction(words[3])


@kernel
def uniform_blocks(
    begin: Int, end: Int, out: Floats, quads: Int, block: Int, first_sample: Int, pass_number: Int, key0: Int, key1: Int
) -> None:
    """As `uniform` for samples of four times `quads` elements in logical order. Items are (sample, block of fours)."""
    blocks = -(-quads // block)
    for item in range(begin, end):
        row = item // blocks
        sample = np.uint64(first_sample + row)
        low, high, number = sample & _WORD, sample >> _SHIFT, np.uint64(pass_number) & _WORD
        first = item % blocks * block
        for quad in range(first, min(quads, first + block)):
            words = philox(np.uint64(quad), low, high, number, np.uint64(key0), np.uint64(key1))
            at = 4 * (row * quads + quad)
            out[at] = fraction(words[0])
            out[at + 1] = fraction(words[1])
            out[at + 2] = fraction(words[2])
            out[at + 3] = fraction(words[3])


BLOCK = 256
"""Groups of four elements per block."""


class CpuRandom(RandomPrimitives, CpuMemory):
    """`RandomPrimitives` of the CPU."""

    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        self._check_dense(out)
        note_host_work()  # the counter changes with every pass
        pass_number, first_sample = counter
        samples = out.shape[0] if out.ndim else 1
        count = out.size // max(1, samples)
        channels, pixels = channels_and_pixels(out.shape)
        quads = -(-count // 4)
        key = ((stream.seed ^ stream.stream) & 0xFFFFFFFF, (stream.seed >> 32) & 0xFFFFFFFF)
        numbers = (first_sample, pass_number, *key)
        # The special kernels have no remainder and no index arithmetic per element. All three give the same numbers.
        if count % 4 == 0 and (channels == 1 or pixels == 1):
            uniform_blocks.run(self.threads, samples * -(-quads // BLOCK), 8, out, quads, BLOCK, *numbers)
            return
        if pixels % 4 == 0 and channels >= 8:
            uniform_images.run(
                self.threads, samples * pixels // 4, -(-2048 // channels), out, pixels, channels, *numbers
            )
            return
        uniform.run(self.threads, samples * quads, 1024, out, count, pixels, channels, quads, *numbers)
