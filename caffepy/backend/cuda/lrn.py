"""Local response normalisation across channels: launches kernels/lrn.cu."""

from __future__ import annotations

import numpy as np

from caffepy.backend.cuda.compiler import THREADS, c_type, defines, divider, library_kernel
from caffepy.backend.cuda.indexing import MAX_INDEX, vector_width
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import Array, LrnWindow

LARGE_SIZE = 32
"""Window size (in channels) above which the kernel loops over the window instead of unrolling it."""


def _launch(name: str, arrays: tuple[Array, ...], window: LrnWindow) -> None:
    channels, large = arrays[0].shape[1], window.size > LARGE_SIZE
    assert len({a.dtype for a in arrays}) == 1, "LRN keeps the dtype"
    width = 1 if large else vector_width(channels, arrays)
    count = arrays[0].size // width
    if count == 0:
        return
    assert count <= MAX_INDEX, f"{arrays[0].shape}: too large for LRN in one piece"
    text = defines(STORED=c_type(arrays[0]), WIDTH=width, SIZE=window.size, LARGE=int(large))
    packs = channels // width
    numbers = map(np.float32, (window.alpha / window.size, window.beta, window.k))
    arguments = (*map(raw, arrays), np.uint32(packs), divider(packs), *numbers, np.uint32(count))
    library_kernel("lrn", name, text)((-(-count // THREADS),), (THREADS,), arguments)


def lrn_forward(x: Array, y: Array, window: LrnWindow) -> None:
    """See `Backend.lrn_across_forward`."""
    _launch("lrn_forward", (x, y), window)


def lrn_backward(x: Array, dy: Array, dx: Array, window: LrnWindow) -> None:
    """See `Backend.lrn_across_backward`."""
    _launch("lrn_backward", (x, dy, dx), window)
