"""Convolutions rewritten as other operations, where few cuDNN engines are fast: first layers and some gradients.

A data gradient with stride 1 equals a forward convolution of padded dy with flipped weights, which is faster for large
windows and for one axis. The weight gradient of a 1x1 convolution is a matrix product with one row per output, one
column per channel and a sum over all pixels of all images. With few channels a single product leaves most
multiprocessors idle. Therefore the pixels are split into parts with separate products, which are added in a fixed order
(split-K).

cuDNN is slow for first layers with one or three channels. Three rewritings give an equivalent problem with more
channels. Padding adds channels of zeros up to a multiple of a load's width. Space-to-depth, for stride s, turns each
s x s block of pixels into one pixel with s * s times as many channels, and a k x k window into one of ceil(k / s) x
ceil(k / s) with stride 1. Row gathering, after space-to-depth, moves the channels of all pixels in a row of the window
to its first pixel, so that windows are one pixel wide. cuDNN computes the equivalent problem between two rearrangements
(kernels/space_to_depth.cu).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from caffepy.backend.cuda.compiler import RESIDENT_BLOCKS, c_type, defines, divider, launch, library_kernel
from caffepy.backend.cuda.convolution.algorithm import (
    AlgorithmFamily,
    Candidate,
    KeepingCandidate,
    Operands,
    Resources,
    sum_parts,
)
from caffepy.backend.cuda.convolution.cudnn import cudnn_candidates
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_pointwise
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import Scratch, raw
from caffepy.backend.types import CHANNELS_LAST, Array, Geometry, convolution_workspace, memory_order, round_up, view

# -- gradients as other operations ---------------------------------------------------------------------

CUDNN_SLOW_WINDOW = 81
"""Minimum window pixels for which cuDNN's channels-last data gradients are slow."""

Choose = Callable[[Task, Operands | None], Candidate | None]

TILE = 64
"""Assumed side of a block's tile of the result."""

MIN_DEPTH = 256
"""Minimum pixels of a part; below, the addition costs more than splitting saves."""

MAX_NUMBERS = 2**22
"""Maximum elements of all parts together."""


def suits_flipping(task: Task) -> bool:
    """Return whether a task is a data gradient for which this may be the fastest."""
    g = task.problem.geometry
    return (
        task.direction is Direction.DATA
        and (len(g.kernel) == 1 or (len(task.problem.x) in CHANNELS_LAST and math.prod(g.kernel) >= CUDNN_SLOW_WINDOW))
        and math.prod(g.kernel) > 1
        and g.group == 1
        and all(step == 1 for step in g.stride)
        and all(pad >= 0 for pad in _padding(task.problem))
    )


def flipped(problem: Problem) -> Problem:
    """Return the forward convolution whose result is the problem's data gradient.

    Its weights (C, num_output, kernel...) are the problem's (num_output, C, kernel...) with reversed spatial axes. Its
    padding is dilation * (kernel - 1) - pad.
    """
    outputs, channels, *kernel = problem.weights
    geometry = replace(problem.geometry, pad=_padding(problem))
    return Problem(problem.y, (channels, outputs, *kernel), geometry, problem.dtype)


def _padding(problem: Problem) -> tuple[int, ...]:
    g = problem.geometry
    return tuple(d * (k - 1) - p for k, p, d in zip(g.kernel, g.pad, g.dilation, strict=True))


class FlippedForward:
    """The candidate: the fastest forward convolution with flipped weights.

    Args:
        task: one that `suits_flipping`.
        choose: returns the candidate of another task.
        resources: scratch memory.
    """

    name = "flipped"

    def __init__(self, task: Task, choose: Choose, resources: Resources) -> None:
        self._task = Task(flipped(task.problem), Direction.FORWARD)
        self._choose = choose
        self._resources = resources
        self._forward: Candidate | None = None

    def prepare(self) -> bool:
        """Choose the forward candidate, which may require tuning."""
        self._forward = self._choose(self._task, None)
        return self._forward is not None

    def run(self, operands: Operands) -> None:
        """Flip the weights in scratch memory, then run the forward convolution."""
        assert self._forward is not None
        self._forward.run(replace(operands, second=self._flipped_weights(operands.second)))

    def _flipped_weights(self, weights: Array) -> Array:
        scratch = self._resources.scratch.get("turned weights", weights.size, weights.dtype.name)
        turned = view(scratch, self._task.problem.weights)
        cupy.copyto(turned, cupy.flip(weights.swapaxes(0, 1), tuple(range(2, weights.ndim))))
        return turned


def parts_of(problem: Problem) -> tuple[int, int]:
    """Return the number of parts and their pixels, a multiple of eight; one part if splitting does not pay."""
    outputs, channels = problem.weights[:2]
    pixels = problem.x[0] * math.prod(problem.x[2:])
    tiles = -(-outputs // TILE) * -(-channels // TILE)
    # As many parts as fill the device of RESIDENT_BLOCKS, which is a constant: the order of the sum is the same on each
    # GPU.
    number = min(RESIDENT_BLOCKS // tiles, pixels // MIN_DEPTH, MAX_NUMBERS // (outputs * channels))
    if number < 2:
        return 1, pixels
    return number, pixels // number // 8 * 8


def suits_split_k(task: Task) -> bool:
    """Return whether the candidate supports a task and may be the fastest."""
    problem = task.problem
    return (
        task.direction is Direction.WEIGHTS
        and len(problem.x) in CHANNELS_LAST
        and problem.geometry.group == 1
        and is_pointwise(problem.geometry)
        and parts_of(problem)[0] > 1
    )


class SplitKProducts:
    """The candidate.

    Args:
        task: a plain one that `suits_split_k`.
        resources: cuBLAS and scratch memory.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        self._problem = task.problem
        self._resources = resources
        self._parts, self._depth = parts_of(task.problem)
        self.name = f"split-K {self._parts}"

    def prepare(self) -> bool:
        return True

    def run(self, operands: Operands) -> None:
        """Launch the products of all parts, one for the remaining pixels, and the addition."""
        outputs, channels = self._problem.weights[:2]
        x, dy = _pixels(operands.first), _pixels(operands.second)
        split = self._parts * self._depth
        number = self._parts + (split < x.shape[0])
        parts = self._resources.scratch.get("parts of a weight gradient", number * outputs * channels)
        parts = parts.reshape(number, outputs, channels)
        shape = (self._parts, self._depth, -1)
        blas = self._resources.blas
        whole = parts[: self._parts]
        # All whole parts in one launch; they are of one length, so the rest is a product of its own.
        blas.gemm_of_parts(dy[:split].reshape(shape), x[:split].reshape(shape), whole, True, False, False)
        if split < x.shape[0]:
            blas.gemm(dy[split:], x[split:], parts[-1], True, False, False)
        sum_parts(parts, raw(operands.out), number, operands.accumulate)


def _pixels(images: Array) -> Array:
    """Return the images as a matrix with one row per pixel."""
    return memory_order(images).reshape(-1, images.shape[1])


# -- equivalent problems with more channels ------------------------------------------------------------

MAX_CHANNELS = 64
"""Maximum channels after space-to-depth; inputs with many channels do not need it."""


@dataclass(frozen=True)
class SpaceToDepth:
    """Rearrangement of one array.

    Args:
        source: shape (N, C, H, W) of the array, with a third spatial axis merged into H.
        target: shape (N, C', H', W') afterwards.
        block: side of the pixel block that becomes one pixel.
        pad: rows and columns of zeros before the first.
        row: neighbouring pixels of a row whose channels are then gathered in one pixel.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    block: int = 1
    pad: tuple[int, int] = (0, 0)
    row: int = 1


@dataclass(frozen=True)
class EquivalentProblem:
    """A problem on rearranged arrays with the same result.

    Args:
        problem: the problem that cuDNN computes.
        x: rearrangement of x.
        weights: rearrangement of the weights.
        y: rearrangement of y; only adds channels.
    """

    problem: Problem
    x: SpaceToDepth
    weights: SpaceToDepth
    y: SpaceToDepth

    def arrays(self, direction: Direction) -> tuple[SpaceToDepth, SpaceToDepth, SpaceToDepth]:
        """Return the rearrangements of the two inputs and the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


def equivalent_problems(problem: Problem, direction: Direction) -> Iterator[tuple[str, EquivalentProblem]]:
    """Yield name prefixes and problems: gathered rows or blocks for small C, padded channels for odd C."""
    if len(problem.x) not in CHANNELS_LAST or problem.geometry.group != 1:
        return
    item = 4 if problem.dtype == "float32" else 2
    unit = 16 // item
    channels, outputs = problem.x[1], round_up(problem.weights[0], unit)
    step = problem.geometry.stride[0]
    inner = round_up(channels * step * step, unit)
    if len(problem.x) == 4 and _has_blocks(problem) and inner <= MAX_CHANNELS:
        blocks = space_to_depth(problem, inner, outputs)
        if direction is not Direction.DATA and channels < unit and blocks.problem.geometry.kernel[1] > 1:
            rows = gather_rows(blocks)
            arrays = math.prod(problem.x) + math.prod(problem.y)
            # Gathered rows repeat each pixel as often as the window is wide: only where that fits the workspace.
            if math.prod(rows.x.target) * item <= convolution_workspace(arrays * item) // 2:
                yield f"widened {rows.problem.x[1]} ", rows
        if step > 1:
            yield f"folded {inner} ", blocks
    widths = {round_up(channels, unit)} | ({round_up(channels, 4)} if channels < 4 else set())
    for width in sorted(widths):
        if (width, outputs) != (channels, problem.weights[0]):
            yield f"padded {width} ", pad_channels(problem, width, outputs)


def _has_blocks(problem: Problem) -> bool:
    g = problem.geometry
    step = g.stride[0]
    return g.stride[1] == step and g.dilation == (1, 1) and min(g.kernel) >= step


def pad_channels(problem: Problem, channels: int, outputs: int) -> EquivalentProblem:
    """Return the problem with this many channels and outputs."""
    x, w, y = problem.x, problem.weights, problem.y
    x_padded, w_padded = (x[0], channels, *x[2:]), (outputs, channels, *w[2:])
    inner = Problem(x_padded, w_padded, problem.geometry, problem.dtype)
    pairs = ((x, x_padded), (w, w_padded), (y, (y[0], outputs, *y[2:])))
    return EquivalentProblem(inner, *(SpaceToDepth(_as_planes(old), _as_planes(new)) for old, new in pairs))


def _as_planes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return (N, C, H, W) with all spatial axes but the last merged into H."""
    return (*shape[:2], math.prod(shape[2:-1]), shape[-1])


def space_to_depth(problem: Problem, channels: int, outputs: int) -> EquivalentProblem:
    """Return the problem with stride 1 over this many channels."""
    g, x, w, y = problem.geometry, problem.x, problem.weights, problem.y
    step = g.stride[0]
    kernel = tuple(-(-k // step) for k in g.kernel)
    size = tuple(out + k - 1 for out, k in zip(y[2:], kernel, strict=True))
    x_blocks, w_blocks = (x[0], channels, *size), (outputs, channels, *kernel)
    inner = Problem(x_blocks, w_blocks, Geometry(kernel, (1, 1), (0, 0), (1, 1)), problem.dtype)
    return EquivalentProblem(
        inner,
        SpaceToDepth(x, x_blocks, step, (g.pad[0], g.pad[1])),
        SpaceToDepth(w, w_blocks, step),
        SpaceToDepth(y, (y[0], outputs, *y[2:])),
    )


def gather_rows(blocks: EquivalentProblem) -> EquivalentProblem:
    """Return a space-to-depth problem with gathered rows; the weights need no copy."""
    problem = blocks.problem
    n, channels, height, width = problem.x
    kernel_h, kernel_w = problem.geometry.kernel
    x = (n, kernel_w * channels, height, width - kernel_w + 1)
    weights = (problem.weights[0], kernel_w * channels, kernel_h, 1)
    inner = Problem(x, weights, Geometry((kernel_h, 1), (1, 1), (0, 0), (1, 1)), problem.dtype)
    return EquivalentProblem(inner, replace(blocks.x, target=x, row=kernel_w), blocks.weights, blocks.y)


def rearrange(change: SpaceToDepth, array: Array, scratch: Scratch, purpose: str) -> Array:
    """Return the rearranged array in scratch memory, or the array itself if nothing changes."""
    if change.source == change.target:
        return array
    out = view(scratch.get(purpose, math.prod(change.target), array.dtype.name), change.target)
    pack = 16 // out.itemsize
    # A pack must not reach from one gathered pixel into the next.
    while (change.target[1] // change.row) % pack:
        pack //= 2
    kernel = library_kernel("space_to_depth", "fold", defines(In=c_type(array), Out=c_type(out), PACK=pack))
    count = out.size // pack
    launch(kernel, count, (raw(array), out, change.source[0], count, *_sizes(change, pack)))
    return out


def restore(change: SpaceToDepth, rearranged: Array, target: Array, accumulate: bool) -> None:
    """target (+)= the inverse rearrangement of `rearranged`."""
    assert change.row == 1, "gathered rows overlap: they have no inverse"
    kernel = library_kernel("space_to_depth", "unfold", defines(In=c_type(rearranged), Out=c_type(target), PACK=1))
    launch(kernel, target.size, (rearranged, raw(target), accumulate, target.size, *_sizes(change, 1)))


def _sizes(change: SpaceToDepth, pack: int) -> tuple[Any, ...]:
    """Return the SIZES of kernels/space_to_depth.cu."""
    (_, channels, height, width), (_, out_channels, out_height, out_width) = change.source, change.target
    divided = (channels, out_height, out_width, out_channels // pack, out_channels // change.row, change.block)
    pairs = [argument for number in divided for argument in (number, divider(number))]
    return (height, width, *pairs, *change.pad)


class SpaceToDepthCandidate:
    """A candidate for an equivalent problem, between rearrangements of its arrays.

    Args:
        task: the original problem's task.
        equivalent: the problem that is computed.
        inner: computes the same task of that problem.
        name: the candidate's name.
        resources: scratch memory.
    """

    def __init__(
        self, task: Task, equivalent: EquivalentProblem, inner: KeepingCandidate, name: str, resources: Resources
    ) -> None:
        self.name = name
        self._task = task
        self._equivalent = equivalent
        self._inner = inner
        self._resources = resources
        self.prepare = inner.prepare
        self.keep = inner.keep

    def run(self, operands: Operands) -> None:
        first, second, out = self._equivalent.arrays(self._task.direction)
        scratch = self._resources.scratch
        a = rearrange(first, operands.first, scratch, "rearranged first")
        b = rearrange(second, operands.second, scratch, "rearranged second")
        dtype = self._task.problem.array_dtype
        if out.source == out.target and operands.out.dtype == dtype and not operands.accumulate:
            self._inner.run(Operands(a, b, operands.out, operands.bias, operands.sums))
            return
        result = view(scratch.get("rearranged result", math.prod(out.target), dtype), out.target)
        self._inner.run(Operands(a, b, result, operands.bias, operands.sums))
        restore(out, result, operands.out, operands.accumulate)


def space_to_depth_families(task: Task, resources: Resources) -> list[AlgorithmFamily]:
    """Return one family per equivalent problem, if channels are few or odd in number."""
    return [_family(name, task, equivalent, resources) for name, equivalent in _equivalents(task)]


def _equivalents(task: Task) -> Iterator[tuple[str, EquivalentProblem]]:
    for name, equivalent in equivalent_problems(task.problem, task.direction):
        # Bias and sums belong to the real outputs; with padded ones their arrays would be too short.
        if task == task.plain or equivalent.y.source == equivalent.y.target:
            yield name, equivalent


def _family(name: str, task: Task, equivalent: EquivalentProblem, resources: Resources) -> AlgorithmFamily:
    inner_task = Task(equivalent.problem, task.direction, task.bias, task.relu, task.sums)

    def candidates(kept: str | None = None) -> Iterator[Candidate]:
        inner_name = None if kept is None else kept.removeprefix(name)
        for inner in cudnn_candidates(inner_task, resources, kept=inner_name):
            yield SpaceToDepthCandidate(task, equivalent, inner, f"{name}{inner.name}", resources)

    return AlgorithmFamily(name, candidates, checked=True, kept=candidates)
