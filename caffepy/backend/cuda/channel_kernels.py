"""Kernels over channel arrays: partitioning into blocks and threads; kernels/columns.cu documents the scheme.

Kernels are compiled for the layout and dtype of their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from caffepy.backend.cuda.compiler import C_TYPES, argument, compiled, device_number, kernel_text
from caffepy.backend.cuda.index_arithmetic import find_period
from caffepy.backend.cuda.memory import Scratch
from caffepy.backend.types import Array

SUM_BLOCKS = 132
"""Blocks of a channel reduction. Fixed, so that the summation order does not depend on the device."""

SUM_GROUPS = 32
"""Maximum column groups per block of a reduction. Fewer groups leave less work for the finishing block."""

NEEDS = {"normalise_measure": ("statistics",)}
"""Additional files that a kernel file requires."""


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of a kernel; the values were measured with benchmarks/gpu_normalise.py.

    Args:
        threads: maximum threads per block.
        rows: rows that a thread loads before it computes on the first.
        width: maximum columns per thread; 8 requires an array of 16-bit elements.
        sums: whether the kernel reduces over rows, with a limited number of blocks.
    """

    threads: int
    rows: int
    width: int = 4
    sums: bool = False


@dataclass(frozen=True)
class Layout:
    """Memory layout of a channel array: (rows, columns), or (rows / inner, columns, inner) if inner is not 1.

    Args:
        rows: elements per channel.
        columns: channels.
        inner: contiguous elements of one channel.
        width: columns per thread, 1 if inner is not 1.
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
        """Return memory for the blocks' partial sums, and the tickets that identify the last block."""
        return scratch.get("column sums", 2 * self.grid[1] * self.layout.columns), scratch.tickets(self.grid[0])

    def launch(self, *arguments: Any) -> None:
        """Launch the kernel; rows, columns and inner are appended to the arguments."""
        sizes = (self.layout.rows, self.layout.columns, self.layout.inner)
        self.kernel(self.grid, self.block, tuple(map(argument, (*arguments, *sizes))))


def find_layout(arrays: Sequence[Array], per_channel: Sequence[Array], widest: int) -> Layout:
    """Return the memory layout of arrays of one shape, with the columns that a thread can load at once."""
    shape = arrays[0].shape
    period = find_period(tuple(shape), (shape[1],), 1)
    assert period is not None, shape
    rows = period.outer * period.inner
    width = 1 if period.inner > 1 else _width(period.size, arrays, per_channel, widest)
    return Layout(rows, period.size, period.inner, width)


def flat_layout(arrays: Sequence[Array], widest: int) -> Layout:
    """Return the layout of arrays without channels, with the elements that a thread can load at once."""
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
    """Return the plan of kernels/<file>.cu for this layout, the arrays' dtypes, a formula and further constants."""
    dtype = tuple((letter, array.dtype.char) for letter, array in types.items())
    key = (layout, tuning, dtype, tuple(settings.items()), formula, device_number())
    return _plan(file, entry or file, *key)


@lru_cache(maxsize=4096)
def _plan(  # noqa: PLR0913 -- all arguments are the cache's key
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
    return Plan(compiled(text, entry), *_launch_shape(layout, tuning), layout)


def _launch_shape(layout: Layout, tuning: Tuning) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return grid and block: (column groups, rows)."""
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
