"""Random numbers and dropout: launches kernels/philox.cu.

Builds the kernel arguments from a stream's key and counter, and chooses the kernel for an array's memory order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import MAX_BLOCKS, THREADS, c_type, defines, divider, library_kernel
from caffepy.backend.cuda.memory import CudaMemory, is_array, raw
from caffepy.backend.interface import RandomPrimitives
from caffepy.backend.types import Array, Counter, RandomStream, channels_and_pixels

LOW = 0xFFFFFFFF


def _run(arrays: tuple[Array, ...], numbers: tuple[Any, ...], stream: RandomStream, counter: Counter) -> None:
    out = arrays[-1]
    if out.size == 0:
        return
    elements = out.size // out.shape[0]
    channels, pixels = channels_and_pixels(tuple(out.shape))
    axes: tuple[Any, ...]
    quads = False
    if channels > 1 and pixels > 1:
        groups = -(-pixels // 4)
        axes = (np.uint32(channels), divider(channels), np.uint32(pixels), np.uint32(groups), divider(groups))
        name, count = "fill_planes", out.shape[0] * groups * channels
    else:
        groups = -(-elements // 4)
        axes = (np.uint32(elements), np.uint32(groups), divider(groups))
        name, count = "fill_rows", out.shape[0] * groups
        quads = elements % 4 == 0 and all(int(a.data.ptr) % (4 * a.itemsize) == 0 for a in arrays)
    kernel = library_kernel("philox", name, _defines(*map(c_type, arrays), quads=quads))
    arguments = (*arrays, *numbers, *axes, *_sequence(stream, counter), np.uint32(count))
    kernel((min(-(-count // THREADS), MAX_BLOCKS),), (THREADS,), arguments)


@cache
def _defines(*types: str, quads: bool) -> str:
    source = defines(SOURCE=types[0]) if len(types) > 1 else ""
    return source + defines(STORED=types[-1], QUADS=int(quads))


def _sequence(stream: RandomStream, counter: Counter) -> tuple[Any, ...]:
    """Return key and counter of a sequence as kernel arguments; the kernel reads a counter in device memory."""
    keys = ((stream.seed & LOW) ^ stream.stream, (stream.seed >> 32) & LOW)
    if is_array(counter):
        assert counter.dtype == np.uint64 and counter.size == 2, counter
        return (*map(np.uint32, keys), np.uint32(0), np.uint64(0), counter)
    pass_number, first_sample = counter
    return (*map(np.uint32, (*keys, pass_number & LOW)), np.uint64(first_sample), np.uint64(0))


class CudaRandom(RandomPrimitives, CudaMemory):
    """`RandomPrimitives` of the GPU."""

    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        _run((raw(out),), (), stream, counter)

    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        numbers = (np.float32(ratio), np.float32(1 / (1 - ratio)))
        _run((raw(source), raw(destination)), numbers, stream, counter)
