"""Pooling on the GPU: launches kernels/pooling.cu, and kernels/roi.cu for stochastic pooling.

dtype, vector width and geometry are compile-time constants, so that small windows are unrolled and the windows that
cover a pixel are computed directly.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from caffepy.backend.cuda.compiler import (
    MAX_GRID,
    MULTIPROCESSORS,
    THREADS,
    Launch,
    c_type,
    defines,
    device_number,
    divider,
    launch,
    library_kernel,
)
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX, vector_width
from caffepy.backend.cuda.memory import CudaMemory, raw
from caffepy.backend.interface import PoolingPrimitives
from caffepy.backend.types import Array, Geometry

MAX_WINDOWS = 9
"""Maximum windows that cover a tile, and pixels of a tile, for gathering gradients by tiles."""

SMALL_AREA = 9
"""Maximum window area for computing two overlapping windows at a time."""

LARGE_PLANE = 16
"""Minimum pixels of a whole-plane window that many threads share."""

MIN_WINDOW_FOR_NARROW_LOADS = 25
"""Minimum window pixels for which more threads with narrower loads are faster."""

MIN_WIDTH = 2
"""Minimum channels per thread when the vector width is reduced."""

FEW_CHANNELS = 4
"""Maximum channels per thread for which registers suffice for that."""


class Pooling(NamedTuple):
    """The properties that determine a pooling kernel and its arguments."""

    name: str
    image: tuple[int, ...]
    pooled: tuple[int, ...]
    geometry: Geometry
    element: str
    mask: str
    width: int
    device: int


def _pool(name: str, arrays: tuple[Array, ...], image: Array, pooled: Array, mask: Array | None, g: Geometry) -> None:
    if _is_too_large(tuple(image.shape), tuple(pooled.shape), g):
        half = image.shape[0] // 2
        for part in (slice(0, half), slice(half, None)):
            # Kernels count with 32 bits, which are faster; images do not depend on each other.
            halves = tuple(array[part] for array in arrays)
            _pool(name, halves, image[part], pooled[part], None if mask is None else mask[part], g)
        return
    every = arrays if mask is None else (*arrays, mask)
    assert arrays[0].dtype == arrays[1].dtype, "pooling's arrays must have one dtype"
    kind = "" if mask is None else c_type(mask)
    case = Pooling(
        name,
        tuple(image.shape),
        tuple(pooled.shape),
        g,
        c_type(arrays[0]),
        kind,
        vector_width(image.shape[1], every),
        device_number(),
    )
    plan = _plan(case)
    if plan is not None:
        first, last = map(raw, arrays)
        every = (first, last) if mask is None else (first, last, raw(mask))
        if mask is not None and name.endswith("backward"):
            every = (first, raw(mask), last)
        plan.kernel(plan.grid, plan.block, (*every, *plan.arguments))


def _is_too_large(image: tuple[int, ...], pooled: tuple[int, ...], g: Geometry) -> bool:
    """Return whether a kernel could exceed 32-bit thread numbers; threads over padding count too."""
    if image[0] == 1:
        return False
    padded = math.prod(n + pad + stride for n, pad, stride in zip(image[2:], g.pad, g.stride, strict=True))
    return math.prod(image[:2]) * max(padded, math.prod(pooled[2:])) > MAX_INDEX


@lru_cache(maxsize=1024)
def _plan(case: Pooling) -> Launch | None:
    """Return the launch of a pooling, or None if there is no work."""
    g = case.geometry
    assert len(case.image) == 4 and len(g.kernel) == 2, "pooling has two spatial axes"
    whole = _is_whole_plane(case)
    case = case if whole else case._replace(width=_width(case))
    near = math.prod((k - 1) // s + 1 for k, s in zip(g.kernel, g.stride, strict=True))
    tiles = near <= MAX_WINDOWS and math.prod(g.stride) <= MAX_WINDOWS
    rows, columns = _rows_and_columns(case, tiles)
    packs = case.image[1] // case.width
    count = case.image[0] * rows * columns * packs
    largest = max(math.prod(case.image), math.prod(case.pooled)) // case.width
    assert max(count, largest) <= MAX_INDEX, f"{case.image}: too large for one pooling launch"
    if count == 0:
        return None
    text = defines(STORED=case.element, WIDTH=case.width) + (defines(MASK=case.mask) if case.mask else "")
    if whole:
        return _plan_whole(case, text)
    text += _geometry_text(g) + defines(TILES=int(tiles)) + (defines(TOGETHER=_together(case)) if case.mask else "")
    walk = [argument for n in (packs, columns, rows) for argument in (np.uint32(n), divider(n))]
    sizes = tuple(np.int32(n) for n in (*case.image[2:], *case.pooled[2:]))
    kernel = library_kernel("pooling", case.name, text)
    return Launch(kernel, (-(-count // THREADS),), (THREADS,), (*sizes, *walk, np.uint32(count)))


def _width(case: Pooling) -> int:
    """Return the channels per thread; fewer (at least two) for large windows until all multiprocessors have blocks."""
    width, count = case.width, math.prod(case.pooled)
    if case.name.endswith("forward") and math.prod(case.geometry.kernel) >= MIN_WINDOW_FOR_NARROW_LOADS:
        while width > MIN_WIDTH and count < MULTIPROCESSORS * THREADS * width:
            width //= 2
    return width


def _is_whole_plane(case: Pooling) -> bool:
    """Return whether one large window covers the whole plane. Gradients of the maximum have no kernel for that."""
    g, plane = case.geometry, case.image[2:]
    few = case.image[0] <= MAX_GRID and math.prod(plane) >= LARGE_PLANE
    whole = g.kernel == plane and case.pooled[2:] == (1, 1) and not any(g.pad)
    return few and whole and case.name != "max_backward"


def _plan_whole(case: Pooling, text: str) -> Launch:
    """Reduce the packs side by side and add threads per pack until all multiprocessors have blocks."""
    images, packs, pixels = case.image[0], case.image[1] // case.width, math.prod(case.image[2:])
    side = 8
    while side > 2 and (side > packs or images * -(-packs // side) < MULTIPROCESSORS):
        side //= 2
    kernel = library_kernel("planes", f"{case.name}_of_plane", text)
    return Launch(kernel, (-(-packs // side), images), (side, THREADS // side), (np.uint32(pixels), np.uint32(packs)))


def _rows_and_columns(case: Pooling, tiles: bool) -> tuple[int, int]:
    """Return the rows and columns of a plane over which threads are distributed."""
    g, (height, width) = case.geometry, case.image[2:]
    if case.name.endswith("backward"):
        if not tiles:
            return height, width
        return -(-(height + g.pad[0]) // g.stride[0]), -(-(width + g.pad[1]) // g.stride[1])
    together = _together(case) if case.name == "max_forward" else 1
    return -(-case.pooled[2] // together), case.pooled[3]


def _together(case: Pooling) -> int:
    """Return the rows of windows per thread."""
    g = case.geometry
    overlap = g.kernel[0] > g.stride[0] and math.prod(g.kernel) <= SMALL_AREA
    return 2 if overlap and case.width <= FEW_CHANNELS else 1


def _geometry_text(g: Geometry) -> str:
    pairs = zip(("KERNEL", "STRIDE", "PAD"), (g.kernel, g.stride, g.pad), strict=True)
    return defines(**{f"{name}_{axis}": n for name, pair in pairs for axis, n in zip("HW", pair, strict=True)})


class CudaPooling(PoolingPrimitives, CudaMemory):
    """`PoolingPrimitives` of the GPU."""

    mask_dtype = "uint8"

    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        _pool("max_forward", (x, y), x, y, mask, geometry)

    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        _pool("max_backward", (dy, dx), dx, dy, mask, geometry)

    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        _pool("average_forward", (x, y), x, y, None, geometry)

    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        _pool("average_backward", (dy, dx), dx, dy, None, geometry)

    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        shapes = (*x.shape[1:], *y.shape[2:], *geometry.kernel, *geometry.stride)
        kernel = library_kernel("roi", "stochastic_forward", defines(STORED="float"))
        assert y.size <= MAX_INDEX, f"stochastic_forward: {y.size} elements are too many for one launch"
        launch(kernel, y.size, (raw(x), raw(chance), raw(y), raw(mask), *shapes, y.size))
