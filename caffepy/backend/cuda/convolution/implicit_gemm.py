"""Small convolutions by own kernels: of small images, and weight gradients over few pixels in half precision.

kernels/small_convolution.cu is for small images, where cuDNN is bound by launch overhead. This module decides when a
problem is small, enumerates its tilings (the work of a block and its division among warps), lays out each block's
shared memory, and ranks the tilings with an approximate cost model.

kernels/small_k_wgrad.cu is for weight gradients over few pixels, in half precision. Such a gradient has more results
than its factors have elements, and is float32. A cuDNN plan writes halves, which a second kernel would convert. Here
each block computes complete sums and writes them once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import (
    C_TYPES,
    TF32_PRODUCTS,
    argument,
    defines,
    divider,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_whole_image
from caffepy.backend.cuda.device import cupy, has_tensor_cores
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import CHANNELS_LAST, Geometry, round_up

# -- small images --------------------------------------------------------------------------------------

SHARED_LIMIT = 220 * 1024
"""Maximum shared memory bytes per block (Hopper has 227 KiB; on smaller GPUs `prepare` fails)."""

PIXEL_COUNTS = (32, 64, 128, 256)
"""Approximate result pixels that a block may compute at once."""

MIN_WINDOW_BY_ROWS = 81
"""Minimum window pixels for which blocks load only the window rows that they need."""

WORDS_A_CLOCK = 5.5
"""Words per clock from L2 to each multiprocessor of an H200 when all multiprocessors load."""


@dataclass(frozen=True)
class Shape:
    """A problem from the kernels' view; all sizes are (height, width).

    Args:
        images: N.
        image: size of the image that the windows move over.
        channels: its channels.
        out: size of the result, one pixel per window.
        outputs: its channels.
        kernel: window size.
        stride: step of the window.
        pad: zeros before the image.
        dilation: distance of window elements.
        flipped: whether it is a data gradient, computed as a convolution of dy with flipped weights.
    """

    images: int
    image: tuple[int, ...]
    channels: int
    out: tuple[int, ...]
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    flipped: bool

    @property
    def depth(self) -> int:
        """Elements of a window."""
        return self.kernel[0] * self.kernel[1] * self.channels


@dataclass(frozen=True)
class Tiling:
    """The division of work; field names are the kernels' constants.

    Args:
        images: images per block at once.
        rows: rows of the result per image.
        tiles_m: tiles of 16 rows per warp.
        tiles_n: tiles of 8 columns per warp.
        warps_m: warps over different rows.
        warps_n: warps over different columns.
        warps_k: warps over parts of a sum.
        parts: for weight gradients, blocks over parts of each sum.
    """

    images: int
    rows: int
    tiles_m: int
    tiles_n: int
    warps_m: int = 1
    warps_n: int = 1
    warps_k: int = 1
    parts: int = 1

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def name(self) -> str:
        numbers = (self.images, self.rows, self.tiles_m, self.tiles_n, self.warps_m, self.warps_n, self.warps_k)
        return "small " + " ".join(map(str, (*numbers, self.parts)))


def shape_of(task: Task) -> Shape:
    """Return a task's problem from the kernels' view."""
    problem, g = task.problem, task.problem.geometry
    if task.direction is not Direction.DATA:
        return Shape(
            problem.x[0],
            problem.x[2:],
            problem.x[1],
            problem.y[2:],
            problem.y[1],
            g.kernel,
            g.stride,
            g.pad,
            g.dilation,
            False,
        )
    pad = tuple(d * (k - 1) - p for d, k, p in zip(g.dilation, g.kernel, g.pad, strict=True))
    return Shape(
        problem.x[0], problem.y[2:], problem.y[1], problem.x[2:], problem.x[1], g.kernel, (1, 1), pad, g.dilation, True
    )


class Layout:
    """Shared memory layout of a tiling's block, and the kernel's parameters.

    Args:
        shape: the problem.
        tiling: the division of work.
        weights: whether it is a weight gradient.
    """

    def __init__(self, shape: Shape, tiling: Tiling, weights: bool) -> None:
        self.shape = shape
        self.tiling = tiling
        self.weights = weights
        self.pixel = _pixel(shape.channels, weights)
        self.pixels = tiling.images * tiling.rows * shape.out[1]
        self.lines = tiling.tiles_m * tiling.warps_m * 16
        self.columns = tiling.tiles_n * tiling.warps_n * 8
        self.kernel_rows = self._kernel_rows()
        size = (
            (rows - 1) * stride + (kernel - 1) * dilation + 1
            for rows, stride, kernel, dilation in zip(
                (tiling.rows, shape.out[1]),
                shape.stride,
                (self.kernel_rows, shape.kernel[1]),
                shape.dilation,
                strict=True,
            )
        )
        self.patch = round_up(tiling.images * math.prod(size) * self.pixel, 4)
        # Four more than a multiple of eight: the eight rows that a warp reads at once begin in different banks.
        self.pitch = round_up(shape.depth, 8) + 4
        if weights or shape.flipped:
            rows = self.lines if weights else self.columns
            self.pitch = rows + 8 if rows % 16 == 0 else rows
        self.depth_steps = -(-shape.depth // 8)
        self.pixel_steps = -(-self.pixels // 8)
        self.pieces = -(-shape.images // tiling.images) * -(-shape.out[0] // tiling.rows)

    def _kernel_rows(self) -> int:
        """Window rows that a block needs: all, except for weight gradients of large windows."""
        shape, columns = self.shape, self.columns
        if not self.weights or math.prod(shape.kernel) < MIN_WINDOW_BY_ROWS:
            return shape.kernel[0]
        row = shape.kernel[1] * shape.channels
        ends = ((first, min(first + columns, shape.depth) - 1) for first in range(0, shape.depth, columns))
        return max(last // row - first // row + 1 for first, last in ends)

    @property
    def words(self) -> int:
        """Words of shared memory: patch, factors and table, later reused for the warps' sums."""
        steps = self.pixel_steps if self.weights else self.depth_steps
        rows = steps * 8 if self.weights or self.shape.flipped else self.columns
        factors = rows * self.pitch
        # The larger of both uses: the sums take the place of image and weights when these are used up.
        return max(self.patch + factors + steps * 8, self.tiling.warps_k * self.lines * self.columns)

    @property
    def grid(self) -> tuple[int, int, int]:
        if self.weights:
            tiles = -(-self.shape.depth // self.columns), -(-self.shape.outputs // self.lines)
            return min(self.tiling.parts, self.pieces), *tiles
        return self.pieces, -(-self.shape.outputs // self.columns), 1

    def time(self, multiprocessors: int) -> float:
        """Return the approximate clocks: loads, multiplications or shared memory reads, and partial sums.

        The coefficients were fitted to 155 tilings of LeNet's and cifar10's convolutions on an H200, with an earlier
        version of the kernels. For these, the better of the model's first two is within 6 % of the fastest.
        """
        t, blocks = self.tiling, math.prod(self.grid)
        factors = self.pixel_steps * 8 * self.lines if self.weights else self.columns * self.shape.depth
        loading = (self.patch + factors) / WORDS_A_CLOCK
        steps = -(-(self.pixel_steps if self.weights else self.depth_steps) // t.warps_k)
        products = t.tiles_m * t.tiles_n
        busy = t.warps * steps * max(2 * products, 4 * t.tiles_m + 2 * t.tiles_n + 2)
        waits = steps * (30 + 4 * products)
        rounds = -(-self.pieces // self.grid[0]) if self.weights else 1
        together = max(1, min(232448 // (4 * self.words + 1024), 2048 // (32 * t.warps), -(-blocks // multiprocessors)))
        alone = rounds * (500 + loading + max(busy * (1 + 8 / t.warps), waits))
        crowded = together * rounds * (loading + busy * (1 + 8 / (t.warps * together)))
        waves = -(-blocks // (multiprocessors * together))
        parts = self.grid[0] * self.shape.outputs * self.shape.depth / (multiprocessors * WORDS_A_CLOCK)
        return float(waves * max(alone, crowded) + (4 * parts if self.weights else 0))

    def constants(self) -> dict[str, int]:
        """Return the constants that the kernels require."""
        s, t = self.shape, self.tiling
        return {
            "HEIGHT": s.image[0],
            "WIDTH": s.image[1],
            "CHANNELS": s.channels,
            "OUT_HEIGHT": s.out[0],
            "OUT_WIDTH": s.out[1],
            "OUTPUTS": s.outputs,
            "KERNEL_H": s.kernel[0],
            "KERNEL_W": s.kernel[1],
            "STRIDE_H": s.stride[0],
            "STRIDE_W": s.stride[1],
            "PAD_H": s.pad[0],
            "PAD_W": s.pad[1],
            "DILATION_H": s.dilation[0],
            "DILATION_W": s.dilation[1],
            "FLIPPED": int(s.flipped),
            "IMAGES": t.images,
            "ROWS": t.rows,
            "PIXEL": self.pixel,
            "TILES_M": t.tiles_m,
            "TILES_N": t.tiles_n,
            "WARPS_M": t.warps_m,
            "WARPS_N": t.warps_n,
            "WARPS_K": t.warps_k,
            "PITCH": self.pitch,
            "KERNEL_ROWS": self.kernel_rows,
        }


def _pixel(channels: int, weights: bool) -> int:
    """Return the words between pixels, chosen to avoid bank conflicts between a warp's lanes."""
    if channels < 4:
        return channels
    unit, rest = (16, 8) if weights else (8, 4)
    return channels + (rest - channels) % unit


def _pieces(shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield images and rows that a block may take at once."""
    choices = set()
    for pixels in PIXEL_COUNTS:
        images = max(1, min(pixels // math.prod(shape.out), shape.images))
        rows = shape.out[0] if images > 1 else max(1, min(round(pixels / shape.out[1]), shape.out[0]))
        even = -(-shape.out[0] // -(-shape.out[0] // rows))
        # Rows in equal parts: a last block with few rows would take as long as a full one.
        choices.add((images, even))
    yield from sorted(choices)


def tilings(shape: Shape, weights: bool, multiprocessors: int) -> list[Layout]:
    """Return all tilings that fit, the likely fastest first."""
    every = _for_weights(shape, multiprocessors) if weights else _for_pixels(shape)
    layouts = [Layout(shape, tiling, weights) for tiling in every]
    fitting = [layout for layout in layouts if 4 * layout.words <= SHARED_LIMIT]
    return sorted(fitting, key=lambda layout: layout.time(multiprocessors))


def _fits_registers(tiles: int, warps: int) -> bool:
    """Return whether the accumulators of this many tiles leave a warp enough registers."""
    return tiles <= (16 if warps > 8 else 28)


def _for_pixels(shape: Shape) -> Iterator[Tiling]:
    columns = -(-shape.outputs // 8)
    choices = {min(columns, 8), -(-columns // 2)}
    for (images, rows), tiles_n in itertools.product(_pieces(shape), sorted(c for c in choices if c <= 8)):
        lines = -(-images * rows * shape.out[1] // 16)
        for tiles_m, warps_k in itertools.product((1, 2, 3, 4), (1, 2, 4)):
            warps_m = -(-lines // tiles_m)
            if 4 <= warps_m * warps_k <= 16 and _fits_registers(tiles_m * tiles_n, warps_m * warps_k):
                yield Tiling(images, rows, tiles_m, tiles_n, warps_m, 1, warps_k)


def _for_weights(shape: Shape, multiprocessors: int) -> Iterator[Tiling]:
    tiles_m = min(-(-shape.outputs // 16), 4)
    columns = -(-shape.depth // 8)
    for (images, rows), tiles_n in itertools.product(_pieces(shape), (1, 2, 3, 4, 5, 8)):
        for warps_n, warps_k in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
            if not 4 <= warps_n * warps_k <= 8 or not _fits_registers(tiles_m * tiles_n, warps_n * warps_k):
                continue
            if tiles_n * (warps_n - 1) >= columns or (tiles_n > columns and tiles_n > 1):
                continue
            one = Layout(shape, Tiling(images, rows, tiles_m, tiles_n, 1, warps_n, warps_k, 1), True)
            tiles = one.grid[1] * one.grid[2]
            for filled in (0.5, 1, 2):
                # A sum is divided among as many blocks as fill the device by half, once or twice; each division costs a
                # partial result.
                parts = min(one.pieces, max(1, int(filled * multiprocessors) // tiles))
                yield Tiling(images, rows, tiles_m, tiles_n, 1, warps_n, warps_k, parts)


MAX_MULTIPLICATIONS = 2**30
"""Maximum multiplications; above, cuDNN is faster."""

MAX_FOR_LARGE_WINDOWS = 2**34
"""The same for weight gradients of large windows, where few channels leave cuDNN's tiles mostly empty."""

MAX_CHANNELS = 64
"""Maximum channels and outputs; above, cuDNN's tensor cores are well used."""

MAX_CANDIDATES = 2
"""Maximum tilings to be tried; each takes half a second to compile."""


def suits_small_kernels(task: Task, resources: Resources) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem, g = task.problem, task.problem.geometry
    large = task.direction is Direction.WEIGHTS and math.prod(g.kernel) >= MIN_WINDOW_BY_ROWS
    most = MAX_FOR_LARGE_WINDOWS if large else MAX_MULTIPLICATIONS
    if len(problem.x) != 4 or g.group != 1 or task.sums or problem.multiplications > most:
        return False
    if problem.dtype == "float32" and not resources.tf32:
        return False
    if max(problem.x[1], problem.weights[0]) > MAX_CHANNELS or math.prod(g.kernel) == 1:
        return False
    if task.direction is Direction.DATA and g.stride != (1, 1):
        return False
    return has_tensor_cores()


def small_candidates(task: Task, resources: Resources) -> list[SmallConvolution]:
    """Return the likely fastest tilings of a task."""
    multiprocessors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    layouts = tilings(shape_of(task), task.direction is Direction.WEIGHTS, multiprocessors)
    return [SmallConvolution(task, layout, resources) for layout in layouts[:MAX_CANDIDATES]]


class SmallConvolution:
    """A candidate: one tiling.

    Args:
        task: the task to compute.
        layout: the tiling with its shared memory layout.
        resources: scratch memory.
    """

    def __init__(self, task: Task, layout: Layout, resources: Resources) -> None:
        self.name = layout.tiling.name
        self._task = task
        self._layout = layout
        self._resources = resources
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile. Return False if the GPU lacks shared memory."""
        layout = self._layout
        limit = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        if 4 * layout.words > limit:
            return False
        name = "weights" if layout.weights else "gather"
        kind = {} if layout.weights else {"GATHER": 1}
        element = C_TYPES[cupy.dtype(self._task.problem.array_dtype).char]
        text = defines(Element=element, **kind, **layout.constants())
        self._kernel = library_kernel("small_convolution", name, text, TF32_PRODUCTS)
        # Beyond 48 KiB a kernel must ask for its shared memory.
        self._kernel.max_dynamic_shared_size_bytes = 4 * layout.words
        return True

    def run(self, operands: Operands) -> None:
        """Launch the kernel, and for weight gradients one that adds the partial sums."""
        if self._layout.weights:
            self._weights(operands)
            return
        bias = operands.bias if self._task.bias else None
        pointer = np.uint64(0) if bias is None else bias
        self._launch(
            raw(operands.first),
            raw(operands.second),
            pointer,
            raw(operands.out),
            self._layout.shape.images,
            bias is not None,
            self._task.relu,
        )

    def _weights(self, operands: Operands) -> None:
        parts, size = self._layout.grid[0], operands.out.size
        out = raw(operands.out)
        direct = parts == 1 and not operands.accumulate
        sums = out if direct else self._resources.scratch.get("parts of a weight gradient", parts * size)
        self._launch(raw(operands.first), raw(operands.second), sums, self._layout.shape.images, self._layout.pieces)
        if not direct:
            sum_parts(sums, out, parts, operands.accumulate)

    def _launch(self, *arguments: Any) -> None:
        layout = self._layout
        values = tuple(map(argument, arguments))
        self._kernel(layout.grid, (32 * layout.tiling.warps,), values, shared_mem=4 * layout.words)


# -- weight gradients over few pixels ------------------------------------------------------------------

MAX_PIXELS = 256
"""Maximum pixels of all images; up to here one block per sum suffices."""

MIN_RESULTS = 2**17
"""Minimum weights; below, there are too few blocks."""

UNIT = 8
"""Channels and outputs must be multiples of a load's halves."""

TILES = ((128, 128), (64, 128), (64, 64))
"""Outputs and window elements per block, the largest first, which reads the least."""

THREADS = 256

TYPES = {"float16": ("float16", "f16"), "bfloat16": ("bfloat16", "bf16")}
"""dtype names in kernels/common.cu and in PTX."""


def suits_small_k_wgrad(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem = task.problem
    if task != Task(problem, Direction.WEIGHTS) or problem.dtype not in TYPES or len(problem.x) not in CHANNELS_LAST:
        return False
    if problem.geometry.group != 1 or problem.x[1] % UNIT or problem.weights[0] % UNIT:
        return False
    if pixels_of(problem) > MAX_PIXELS or math.prod(problem.weights) < MIN_RESULTS:
        return False
    if max(math.prod(problem.x), math.prod(problem.weights)) > MAX_INDEX:
        return False
    return has_tensor_cores()


def pixels_of(problem: Problem) -> int:
    """Return the length of each sum."""
    return problem.y[0] * math.prod(problem.y[2:])


def small_k_wgrad_candidates(task: Task) -> list[SmallKWgrad]:
    """Return one candidate per tile."""
    return [SmallKWgrad(task, tile) for tile in TILES]


class SmallKWgrad:
    """A candidate: one tile.

    Args:
        task: one that `suits_small_k_wgrad`.
        tile: outputs and window elements per block.
    """

    def __init__(self, task: Task, tile: tuple[int, int]) -> None:
        problem = task.problem
        self.name = f"wgrad small-k {tile[0]}x{tile[1]}"
        self._tile = tile
        self._dtype = problem.dtype
        outputs, columns = problem.weights[0], math.prod(problem.weights[1:])
        self._grid = (-(-columns // tile[1]), -(-outputs // tile[0]))
        self._sizes = (outputs, columns, pixels_of(problem))
        self._geometry = _arguments(problem)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile; the text does not depend on the problem."""
        element, name = TYPES[self._dtype]
        text = defines(Element=element, MMA_TYPE=f'"{name}"', TILE_M=self._tile[0], TILE_N=self._tile[1])
        self._kernel = library_kernel("small_k_wgrad", "small_k_wgrad", text)
        return True

    def run(self, operands: Operands) -> None:
        """One launch."""
        arrays = (raw(operands.first), raw(operands.second), raw(operands.out))
        arguments = (*arrays, *self._sizes, operands.accumulate, *self._geometry)
        launch_blocks(self._kernel, self._grid, (THREADS,), arguments)


def _arguments(problem: Problem) -> tuple[Any, ...]:
    """Return the geometry as kernel arguments over three axes; a whole image is one pixel."""
    if is_whole_image(problem):
        channels = math.prod(problem.x[1:])
        pixel = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
        problem = Problem((problem.x[0], channels, 1, 1), (problem.weights[0], channels, 1, 1), pixel)
    g, channels, more = problem.geometry, problem.x[1], 5 - len(problem.x)
    ones, zeros = (1,) * more, (0,) * more
    divided_sizes = (*(*ones, *g.kernel)[1:], *ones, *problem.y[2:])
    divided = [value for size in divided_sizes for value in (np.int32(size), divider(size))]
    moves = (*ones, *g.stride, *zeros, *g.pad, *ones, *g.dilation)
    return (channels, divider(channels), *divided, *ones, *problem.x[2:], *moves)
