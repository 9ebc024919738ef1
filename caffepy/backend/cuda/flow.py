"""Comparison of images at displacements, and sampling at positions, on the GPU: launches kernels/flow.cu."""

from __future__ import annotations

import math

from caffepy.backend.cuda.compiler import MAX_BLOCKS, THREADS, launch, launch_blocks, library_kernel
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import CudaMemory, fill, raw
from caffepy.backend.interface import FlowPrimitives
from caffepy.backend.types import Array, Border, CorrelationWindow

WARPS = THREADS // 32


def _run(name: str, items: int, *arguments: object) -> None:
    """Launch a kernel with one thread per item."""
    assert items <= MAX_INDEX, f"{name}: {items} elements are too many for one launch"
    launch(library_kernel("flow", name), items, (*arguments, items))


def _run_warps(name: str, items: int, *arguments: object) -> None:
    """Launch a kernel with one warp per item."""
    if items:
        grid = (min(-(-items // WARPS), MAX_BLOCKS),)
        launch_blocks(library_kernel("flow", name), grid, (THREADS,), (*arguments, items))


class CudaFlow(FlowPrimitives, CudaMemory):
    """`FlowPrimitives` of the GPU."""

    def correlate_forward(self, a: Array, b: Array, y: Array, window: CorrelationWindow) -> None:
        scale = 1 / (window.kernel**2 * max(a.shape[1], 1))
        sizes = (*a.shape[1:], *y.shape[2:])
        pixels = y.shape[0] * math.prod(y.shape[2:])
        _run_warps("correlate", pixels, raw(a), raw(b), raw(y), *sizes, *window.numbers, scale)

    def correlate_backward(
        self, dy: Array, a: Array, b: Array, da: Array | None, db: Array | None, window: CorrelationWindow
    ) -> None:
        scale = 1 / (window.kernel**2 * max(a.shape[1], 1))
        sizes = (*a.shape[1:], *dy.shape[2:])
        for second, (own, other, gradient) in enumerate(((a, b, da), (b, a, db))):
            if gradient is not None:
                arrays = (raw(dy), raw(own), raw(other), raw(gradient))
                _run("correlate_gradient", a.size, *arrays, *sizes, *window.numbers, scale, second)

    def sample_forward(self, x: Array, positions: Array, y: Array, border: Border, fill: float) -> None:
        sizes = (*x.shape[1:], math.prod(y.shape[2:]), int(border))
        _run("sample_forward", y.size, raw(x), raw(positions), raw(y), *sizes, float(fill))

    def sample_backward(
        self, x: Array, positions: Array, dy: Array, dx: Array | None, d_positions: Array | None, border: Border
    ) -> None:
        sizes = (*x.shape[1:], math.prod(dy.shape[2:]), int(border))
        if dx is not None:
            sums, largest = self._scratch.get("samples", x.size, "int64"), self._scratch.get("largest", 1, "int32")
            fill(sums, 0)
            fill(largest, 0)
            _run("largest_size", dy.size, raw(dy), largest)
            _run("scatter_samples", dy.size, raw(positions), raw(dy), largest, sums, *sizes)
            _run("finish_samples", dx.size, sums, largest, raw(dx))
        if d_positions is not None:
            pixels = dy.shape[0] * math.prod(dy.shape[2:])
            arrays = (raw(x), raw(positions), raw(dy), raw(d_positions))
            _run_warps("position_gradient", pixels, *arrays, *sizes)
