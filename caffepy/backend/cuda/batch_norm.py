"""Batch normalisation, gradients of activations, sums of arrays: chooses kernels for the arrays and launches them.

Owns how an array of channels is dealt out to blocks and threads; kernels/columns.cu describes the scheme. Each
primitive is one launch, sums included, and reads and writes every array once. Kernels are compiled for the dtype of
their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import (
    C_TYPES,
    argument,
    compiled,
    device_number,
    kernel_text,
    launch,
    library_kernel,
)
from caffepy.backend.cuda.indexing import find_period
from caffepy.backend.cuda.memory import Scratch, raw
from caffepy.backend.types import Array, BatchNormState

SUM_BLOCKS = 132
"""Blocks that add up channels; fixed, so that the order of a sum depends on no device."""

SUM_GROUPS = 32
"""Most groups of columns that a block adds up: the fewer, the less is left to do for the block that finishes them."""

MAX_SOURCES = 8
"""Arrays that one launch of `add_n` adds up."""

MAX_GRADIENTS = 4
"""Gradients that one launch of `backward_sums` adds up; each takes registers of every thread."""

NEEDS = {"normalise_measure": ("statistics",)}
"""Files that a kernel file needs before it, beside the usual ones."""


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut into threads; what each number is worth was measured, see benchmarks/gpu_normalise.py.

    Args:
        threads: most threads of a block.
        rows: rows that a thread loads before it works on the first.
        width: columns that a thread takes at most; 8 needs an array of 16-bit numbers.
        sums: whether the kernel adds up over rows, for which there are few blocks.
    """

    threads: int
    rows: int
    width: int = 4
    sums: bool = False


FORWARD = Tuning(128, 4)
FORWARD_RESIDUAL = Tuning(128, 4, width=8)
DATA = Tuning(128, 4)
ACTIVATION = Tuning(128, 4)
TOTAL = Tuning(128, 4)
TOTAL_OF_MANY = Tuning(128, 1)
MEASURE = Tuning(1024, 8, sums=True)
SUMS = Tuning(1024, 4, sums=True)
SUMS_OF_TWO_HALVES = Tuning(1024, 4, sums=True)
SUMS_OF_MANY = Tuning(1024, 2, sums=True)
ACTIVATION_AND_BIAS = Tuning(1024, 4, sums=True)


@dataclass(frozen=True)
class Layout:
    """An array of channels in memory: (rows, columns), or (rows / inner, columns, inner) where inner is not 1.

    Args:
        rows: elements of each channel.
        columns: channels.
        inner: neighbours that belong to one channel.
        width: columns that a thread takes, 1 where inner is not 1.
    """

    rows: int
    columns: int
    inner: int
    width: int


@dataclass(frozen=True)
class Plan:
    """A kernel with its grid (blocks of columns, blocks of rows) and block, for arrays of one layout and dtype."""

    kernel: Any
    grid: tuple[int, int]
    block: tuple[int, int]
    layout: Layout

    def between_blocks(self, scratch: Scratch) -> tuple[Array, Array]:
        """Memory for the sums that blocks leave and for the tickets by which they find out who is last."""
        return scratch.get("column sums", 2 * self.grid[1] * self.layout.columns), scratch.tickets(self.grid[0])

    def launch(self, *arguments: Any) -> None:
        """Run it; rows, columns and inner follow the arguments."""
        sizes = (self.layout.rows, self.layout.columns, self.layout.inner)
        self.kernel(self.grid, self.block, tuple(map(argument, (*arguments, *sizes))))


def find_layout(arrays: Sequence[Array], per_channel: Sequence[Array], widest: int) -> Layout:
    """How arrays of one shape lie in memory, and how many columns a thread can take at once."""
    shape = arrays[0].shape
    period = find_period(tuple(shape), (shape[1],), 1)
    assert period is not None, shape
    rows = period.outer * period.inner
    width = 1 if period.inner > 1 else _width(period.size, arrays, per_channel, widest)
    return Layout(rows, period.size, period.inner, width)


def flat_layout(arrays: Sequence[Array], widest: int) -> Layout:
    """Arrays without channels: as many columns as a thread takes at once."""
    width = _width(arrays[0].size, arrays, (), widest)
    return Layout(arrays[0].size // width, width, 1, width)


def _width(columns: int, arrays: Sequence[Array], per_channel: Sequence[Array], widest: int) -> int:
    narrow = any(a.itemsize == 2 for a in arrays)
    for width in (8, 4) if narrow and widest == 8 else (4,):
        fits = all(a.data.ptr % min(16, width * a.itemsize) == 0 for a in arrays)
        if fits and columns % width == 0 and all(a.data.ptr % 16 == 0 for a in per_channel):
            return width
    return 1


def make_plan(
    file: str, layout: Layout, tuning: Tuning, types: dict[str, Array], entry: str = "",
    formula: str = "", **settings: Any,
) -> Plan:  # fmt: skip
    """The kernel of kernels/<file>.cu for this layout, the dtype of arrays, its formula and further constants."""
    dtype = tuple((letter, array.dtype.char) for letter, array in types.items())
    key = (layout, tuning, dtype, tuple(settings.items()), formula, device_number())
    return _plan(file, entry or file, *key)


@lru_cache(maxsize=4096)
def _plan(  # noqa: PLR0913 -- all of it is the cache's key
    file: str, entry: str, layout: Layout, tuning: Tuning, dtype: tuple[tuple[str, str], ...],
    settings: tuple[tuple[str, Any], ...], formula: str, device: int,
) -> Plan:  # fmt: skip
    constants = {
        "V": layout.width, "ROWS": tuning.rows, "THREADS": tuning.threads, "GROUPS": SUM_GROUPS,
        "INNER": layout.inner > 1, "SUMS": tuning.sums, **dict(settings),
    }  # fmt: skip
    lines = [f"using {letter} = {C_TYPES[char]};\n" for letter, char in dtype]
    lines += [f"constexpr int {name} = {int(value)};\n" for name, value in constants.items()]
    files = ["columns", "column_sums", *NEEDS.get(file, ())]
    text = "".join([kernel_text("common"), *lines, *map(kernel_text, files), formula, kernel_text(file)])
    return Plan(compiled(text, entry), *_cut(layout, tuning), layout)


def _cut(layout: Layout, tuning: Tuning) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block: (groups of columns, rows)."""
    groups = layout.columns // layout.width
    together = 1 if layout.inner > 1 else SUM_GROUPS if tuning.sums else tuning.threads
    column_blocks = -(-groups // together)
    across = -(-groups // column_blocks)
    if across > 1 and column_blocks > 1:
        across += across % 2
        column_blocks = -(-groups // across)
    down = tuning.threads // across
    tiles = -(-layout.rows // (tuning.rows * down))
    most = max(1, SUM_BLOCKS // column_blocks) if tuning.sums else 65535
    return (column_blocks, max(1, min(tiles, most))), (across, down)


class BatchNormKernels:
    """The primitives of one backend.

    Args:
        scratch: where the sums of blocks are kept until the last one has come.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def measure(self, x: Array, n: BatchNormState) -> None:
        """See `Backend.batch_norm_measure`."""
        plan = make_plan("normalise_measure", find_layout((x,), (), MEASURE.width), MEASURE, {"X": x}, "measure")
        plan.launch(
            raw(x), *plan.between_blocks(self._scratch), n.mean, n.inverse, n.sum_mean, n.sum_variance, n.count,
            float(n.epsilon), float(n.fraction),
        )  # fmt: skip

    def measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        """See `Backend.batch_norm_measure_sums`."""
        arrays = (n.mean, n.inverse, n.sum_mean, n.sum_variance, n.count)
        numbers = (float(n.epsilon), float(n.fraction), elements, n.mean.size)
        launch(library_kernel("statistics", "measure_sums"), n.mean.size, (raw(sums), *arrays, *numbers))

    def load(self, n: BatchNormState) -> None:
        """See `Backend.batch_norm_load`."""
        arrays = (n.sum_mean, n.sum_variance, n.count, n.mean, n.inverse)
        kernel = library_kernel("statistics", "load_statistics")
        launch(kernel, n.mean.size, (*arrays, float(n.epsilon), n.mean.size))

    def forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None, relu: bool, mask: Array | None
    ) -> None:
        """See `Backend.batch_norm_forward`."""
        other = x if residual is None else residual
        arrays, per_channel = (raw(x), raw(other), raw(y)), (n.mean, n.inverse, n.scale, n.bias)
        tuning = FORWARD if residual is None else FORWARD_RESIDUAL
        layout = find_layout(arrays, per_channel, tuning.width)
        whole_bytes = layout.width > 1 and layout.columns % 8 == 0
        by_bits = mask is not None and not whole_bytes
        plan = make_plan(
            "normalise_forward", layout, tuning, {"X": x, "R": other, "Y": y},
            "normalise_forward_bits" if by_bits else "normalise_forward",
            RESIDUAL=residual is not None, RELU=relu, MASK=mask is not None,
        )  # fmt: skip
        inputs = (x, *per_channel, other, y, y if mask is None else mask)
        if by_bits:
            size = np.uint64(x.size)
            launch(plan.kernel, -(-x.size // 8), (*inputs, layout.columns, layout.inner, size))
        else:
            plan.launch(*inputs)

    def backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool,
        mask: Array | None, total: Array | None,
    ) -> None:  # fmt: skip
        """See `Backend.batch_norm_backward_sums`."""
        dys = self._at_most_four(dys, total)
        arrays = [raw(a) for a in (x, *dys, *(() if total is None else (total,)))]
        assert len({a.dtype for a in arrays[1:]}) == 1, "gradients and their total are of one dtype"
        assert total is not None or len(dys) == 1, "several gradients need an array for their sum"
        per_channel = (n.mean, n.inverse, n.scale, n.bias)
        few = len(dys) <= 2 and x.itemsize == dys[0].itemsize == 2
        tuning = SUMS if total is None else SUMS_OF_TWO_HALVES if few else SUMS_OF_MANY
        plan = make_plan(
            "normalise_sums", find_layout(arrays, per_channel, tuning.width), tuning, {"X": x, "D": dys[0]},
            SOURCES=len(dys), RELU=0 if not relu else 2 if mask is None else 1, TOTAL=total is not None,
        )  # fmt: skip
        sources = [*dys, *[dys[0]] * (MAX_GRADIENTS - len(dys))]
        out = dys[0] if total is None else total
        relu_source = x if mask is None else mask
        plan.launch(x, *sources, *per_channel, relu_source, out, *sums, *plan.between_blocks(self._scratch))

    def _at_most_four(self, dys: Sequence[Array], total: Array | None) -> Sequence[Array]:
        """As many gradients as one launch adds up: the surplus is added up in `total`, which then is one of them."""
        if len(dys) <= MAX_GRADIENTS:
            return dys
        assert total is not None, "several gradients need an array for their sum"
        here = total.data.ptr
        # What lies in the total already must be in it afterwards.
        first, *others = sorted(dys, key=lambda a: a.data.ptr != here)
        self.add_n([first, *others[MAX_GRADIENTS - 1 :]], total)
        return [total, *others[: MAX_GRADIENTS - 1]]

    def backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool
    ) -> None:
        """See `Backend.batch_norm_backward_data`."""
        per_channel = (n.mean, n.inverse, n.scale, n.bias, *sums)
        layout = find_layout((raw(x), raw(dy), raw(dx)), per_channel, DATA.width)
        plan = make_plan("normalise_gradient", layout, DATA, {"X": x, "D": dy, "Y": dx}, RELU=relu)
        plan.launch(x, dy, *per_channel, dx, 1.0 / max(layout.rows, 1))

    def activation_backward(
        self, formula: str, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        """See `Backend.activation_backward`; the formula as CUDA C."""
        arrays = (raw(y), raw(dy), raw(dx))
        types = {"X": y, "D": dy, "Y": dx}
        if dbias is None:
            layout = flat_layout(arrays, ACTIVATION.width)
            plan = make_plan("activation_gradient", layout, ACTIVATION, types, formula=formula, BIASED=False)
            plan.launch(y, dy, dx, dx, False, dx, dx)
        else:
            layout = find_layout(arrays, (), ACTIVATION_AND_BIAS.width)
            plan = make_plan("activation_gradient", layout, ACTIVATION_AND_BIAS, types, formula=formula, BIASED=True)
            plan.launch(y, dy, dx, dbias, accumulate, *plan.between_blocks(self._scratch))

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        """See `Backend.add_n`."""
        here = destination.data.ptr
        remaining = sorted(map(raw, sources), key=lambda a: a.data.ptr != here)
        assert len({a.dtype for a in remaining}) == 1, "sources are of one dtype"
        while len(remaining) > 1:
            now, remaining = remaining[:MAX_SOURCES], [destination, *remaining[MAX_SOURCES:]]
            tuning = TOTAL if len(now) < 4 else TOTAL_OF_MANY
            layout = flat_layout((*now, raw(destination)), tuning.width)
            plan = make_plan("add_n", layout, tuning, {"D": now[0], "Y": destination}, SOURCES=len(now))
            plan.launch(*now, *[now[0]] * (MAX_SOURCES - len(now)), destination)
