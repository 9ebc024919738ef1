"""Formulas on the GPU for any dtype, elementwise and reduced: kernel selection by geometry, and launches.

A formula's kernel is selected by geometry: the vector width and the indexing of Channel arguments. If the block size is
a multiple of their period, the thread's number alone gives the index; otherwise the kernel divides and takes a
remainder. If each image has its own part of an argument, a grid axis counts images. Arguments without a period are
first broadcast to the whole shape. Plans are cached by formula, shapes, dtypes and alignment, so that a call costs
little more than its launch.

Kernels over channel arrays are compiled for the layout and dtype of their arrays; kernels/columns.cu documents how such
arrays are divided into blocks and threads.

Reductions are of three kinds: columns (channels last, or the rows of a matrix), segments (the whole array, or
contiguous axes) and general (first transposed into segments). The number of partial sums is chosen here too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cuda.codegen import (
    Access,
    Variant,
    apply_text,
    formula_text,
    reduce_columns_text,
    reduce_segments_text,
)
from caffepy.backend.cuda.compiler import (
    C_TYPES,
    MAX_BLOCKS,
    MAX_GRID,
    MULTIPROCESSORS,
    THREADS,
    argument,
    c_type,
    compiled,
    defines,
    device_number,
    divider,
    kernel_text,
    library_kernel,
)
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.index_arithmetic import widest
from caffepy.backend.cuda.memory import CudaMemory, Scratch, copy, fill, flat, is_array, raw
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.formulas import identity
from caffepy.backend.interface import ElementwisePrimitives, ReductionPrimitives
from caffepy.backend.period import Period, find_period
from caffepy.backend.types import Array, is_dense, memory_axes, view

# -- kernels over channel arrays -----------------------------------------------------------------------

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

    def without_sizes(self) -> Layout:
        """Return one layout for all that share a kernel."""
        return Layout(1, self.width, min(self.inner, 2), self.width)


@dataclass(frozen=True)
class ChannelLaunch:
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


def make_launch(
    file: str,
    layout: Layout,
    tuning: Tuning,
    types: dict[str, str],
    entry: str = "",
    formula: str = "",
    **settings: Any,
) -> ChannelLaunch:
    """Return the plan of kernels/<file>.cu for this layout, C types, a formula and further constants."""
    key = (layout, tuning, tuple(types.items()), tuple(settings.items()), formula, device_number())
    return _plan(file, entry or file, *key)


@lru_cache(maxsize=4096)
def _plan(
    file: str,
    entry: str,
    layout: Layout,
    tuning: Tuning,
    ctypes: tuple[tuple[str, str], ...],
    settings: tuple[tuple[str, Any], ...],
    formula: str,
    device: int,
) -> ChannelLaunch:
    constants = {
        "V": layout.width,
        "ROWS": tuning.rows,
        "THREADS": tuning.threads,
        "GROUPS": SUM_GROUPS,
        "INNER": layout.inner > 1,
        "SUMS": tuning.sums,
        **dict(settings),
    }
    lines = [f"using {letter} = {name};\n" for letter, name in ctypes]
    lines += [f"constexpr int {name} = {int(value)};\n" for name, value in constants.items()]
    files = ["columns", "column_sums", *NEEDS.get(file, ())]
    text = "".join([kernel_text("common"), *lines, *map(kernel_text, files), formula, kernel_text(file)])
    return ChannelLaunch(compiled(text, entry), *_launch_shape(layout, tuning), layout)


def _launch_shape(layout: Layout, tuning: Tuning) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return grid and block: (column groups, rows)."""
    groups = layout.columns // layout.width
    # With `inner`, neighbours in memory belong to one channel: threads of a block share it.
    together = 1 if layout.inner > 1 else SUM_GROUPS if tuning.sums else tuning.threads
    column_blocks = -(-groups // together)
    across = -(-groups // column_blocks)
    if across > 1 and column_blocks > 1:
        # An even number: two neighbours in a row make a byte of the mask (kernels/normalise_forward.cu), and must be in
        # one block.
        across += across % 2
        column_blocks = -(-groups // across)
    down = tuning.threads // across
    tiles = -(-layout.rows // (tuning.rows * down))
    most = max(1, SUM_BLOCKS // column_blocks) if tuning.sums else MAX_GRID
    return (column_blocks, max(1, min(tiles, most))), (across, down)


# -- elementwise formulas ------------------------------------------------------------------------------

Argument = Any
"""An array or a number."""

MAX_SOURCES = 8
"""Maximum arrays per launch of `add_n`."""

TOTAL = Tuning(128, 4)
TOTAL_OF_MANY = Tuning(128, 1)

MAX_THREADS = 512
"""Maximum period of Channel arguments for which the block size is adapted to it."""

FEW_PACKS = 2**17
"""Packs below which each pack has its own thread, to spread small arrays over the whole GPU."""

SLOW_FUNCTIONS = ("powf(", "expf(", "logf(", "log1pf(", "tanhf(")
"""Calls that hide load latency and are too long to be unrolled."""


class Signature(NamedTuple):
    """The properties of an array that determine the kernel."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    dtype: str

    @property
    def item(self) -> int:
        return np.dtype(self.dtype).itemsize

    def allows(self, width: int) -> bool:
        """Return whether packs of `width` elements are aligned."""
        return self.alignment % min(16, width * self.item) == 0


def _signature(value: Argument) -> Signature | None:
    """Return an array's signature, or None for a number."""
    if not is_array(value):
        return None
    return Signature(value.shape, value.strides, math.gcd(int(value.data.ptr), 16), value.dtype.char)


class Call(NamedTuple):
    """A formula with its arguments' signatures: the key of cached plans."""

    expression: Expression
    inputs: tuple[Signature | None, ...]
    outputs: tuple[Signature, ...]
    axis: int
    device: int

    def of_kind(self, kind: Kind) -> dict[str, Signature]:
        named = zip(self.expression.parameters, self.expression.kinds, self.inputs, strict=True)
        return {name: s for name, k, s in named if k is kind and s is not None}

    def periods(self, shape: tuple[int, ...]) -> dict[str, Period | None]:
        """Return the period of each Channel argument."""
        return {name: find_period(shape, s.shape, self.axis) for name, s in self.of_kind(Kind.CHANNEL).items()}

    def check(self) -> None:
        """Check that all arrays are dense and of supported types; the kernels index memory directly."""
        plain = {*self.of_kind(Kind.CHANNEL).values(), *self.of_kind(Kind.SCALAR).values()}
        for s in (*self.inputs, *self.outputs):
            assert s is None or is_dense(s.shape, s.strides, s.item), (self.expression, s)
            assert s is None or s.dtype in ("f" if s in plain else "feH"), (self.expression, s)

    def device_scalars(self) -> frozenset[str]:
        return frozenset(self.of_kind(Kind.SCALAR))

    def each_types(self) -> tuple[str, ...]:
        return tuple(C_TYPES[s.dtype] for s in self.of_kind(Kind.EACH).values())

    def output_types(self) -> tuple[str, ...]:
        return tuple(C_TYPES[s.dtype] for s in self.outputs)


def make_call(expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int) -> Call:
    """Return the key of a call of `apply` or `reduce`."""
    device = device_number()
    results = tuple(s for s in map(_signature, outputs) if s is not None)
    return Call(expression, tuple(map(_signature, inputs)), results, axis, device)


@dataclass(frozen=True)
class FormulaLaunch:
    """A planned launch, reusable for all arrays of one `Call`.

    Args:
        kernel: the compiled kernel.
        grid: blocks.
        block: threads.
        head: arguments before the formula's arguments.
        extras: arguments after each of the formula's arguments.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    head: tuple[Any, ...]
    extras: tuple[tuple[Any, ...], ...]

    def run(self, inputs: Sequence[Argument], outputs: Sequence[Array], *tail: Any) -> None:
        arguments = [*self.head]
        for value, extra in zip(inputs, self.extras, strict=True):
            arguments.append(value if is_array(value) else np.float32(value))
            arguments += extra
        self.kernel(self.grid, self.block, (*arguments, *outputs, *tail))


def apply(
    expression: Expression,
    inputs: Sequence[Argument],
    outputs: Sequence[Array],
    axis: int,
    scratch: Scratch | None = None,
) -> None:
    """outputs = expression(*inputs), see `Backend.apply`. Channel arguments without a period need `scratch`."""
    if outputs[0].size == 0:
        return
    plan = _plan_apply(make_call(expression, inputs, outputs, axis))
    if plan is None:
        assert scratch is not None, f"{expression}: a Channel argument has no period"
        apply(expression, spread_out(expression, inputs, tuple(outputs[0].shape), axis, scratch), outputs, 0)
    else:
        plan.run(inputs, outputs)


def spread_out(
    expression: Expression, inputs: Sequence[Argument], shape: tuple[int, ...], axis: int, scratch: Scratch
) -> list[Argument]:
    """Return the inputs with each Channel argument broadcast to the whole shape, so that its axis is 0."""
    spread = list(inputs)
    for i, kind in enumerate(expression.kinds):
        if kind is Kind.CHANNEL:
            own = (None,) * axis + (slice(None),) * inputs[i].ndim
            rest = (None,) * (len(shape) - axis - inputs[i].ndim)
            spread[i] = view(scratch.get(f"argument {i}", math.prod(shape)), shape)
            copy(cupy.broadcast_to(inputs[i][own + rest], shape), spread[i])
    return spread


@lru_cache(maxsize=4096)
def _plan_apply(call: Call) -> FormulaLaunch | None:
    """Return the kernel of an elementwise call, or None if a Channel argument has no period."""
    shape = call.outputs[0].shape
    periods = {name: period for name, period in call.periods(shape).items() if period is not None}
    images = _common_images(periods.values())
    if len(periods) < len(call.of_kind(Kind.CHANNEL)) or images == 0:
        return None
    call.check()
    size = math.prod(shape) // images
    width = pack_width(call, (*call.of_kind(Kind.EACH).values(), *call.outputs), periods, size)
    packs = size // width
    threads = _threads([repeat for p in periods.values() if (repeat := _repeat(p, width))])
    channels = tuple(access(p, width, threads) for p in periods.values())
    index, unroll = index_type(packs), _unroll(call, packs * images, channels)
    types = (call.each_types(), call.output_types())
    variant = Variant(*types, width, unroll, index, call.device_scalars(), channels, images > 1)
    kernel = compiled(kernel_text("common") + apply_text(call.expression, variant), "apply_")
    blocks = -(-packs // (threads * unroll))
    head = (count_argument(packs, index),)
    return FormulaLaunch(kernel, (blocks, images), (threads,), head, extras(call, periods, width))


def _common_images(periods: Collection[Period]) -> int:
    """Return the images that have their own parts of the Channel arguments; 0 if one launch cannot compute them."""
    images = max((period.images for period in periods), default=1)
    return images if images <= MAX_GRID and all(p.images == images or p.size == 1 for p in periods) else 0


def index_type(packs: int) -> str:
    """Return the C type of pack numbers."""
    return "unsigned int" if packs < 2**31 else "unsigned long long"


def count_argument(value: int, index: str) -> Any:
    """Return a pack count as an argument of that type."""
    return np.uint32(value) if index == "unsigned int" else np.uint64(value)


def pack_width(call: Call, each: Sequence[Signature], periods: Mapping[str, Period], span: int) -> int:
    """Return the elements per pack, given that `span` elements are contiguous."""
    channels = call.of_kind(Kind.CHANNEL)

    def fits(width: int) -> bool:
        return (
            span % width == 0
            and all(s.allows(width) for s in each)
            and all(_is_splat(p, width) or _is_packed(p, width, channels[name]) for name, p in periods.items())
        )

    width = 16 // max(s.item for s in each)
    while width > 1 and not fits(width):
        width //= 2
    return width


def _is_splat(period: Period, width: int) -> bool:
    """Return whether all elements of a pack use one element of the Channel argument."""
    return period.size == 1 or period.inner % width == 0


def _is_packed(period: Period, width: int, channel: Signature) -> bool:
    """Return whether the elements of a pack use contiguous elements of the Channel argument."""
    return period.inner == 1 and period.size % width == 0 and channel.allows(width)


def _packed(period: Period, width: int) -> bool:
    return width > 1 and not _is_splat(period, width)


def _repeat(period: Period, width: int) -> int:
    """Return a Channel argument's period in packs; 0 if the thread's number does not determine the index."""
    if period.size == 1 or period.outer == 1:
        return 0
    if _packed(period, width):
        return period.size // width
    return period.size if period.inner == width else 0


def _threads(repeats: list[int]) -> int:
    """Return the block size: full warps near the default, and a multiple of all periods if possible."""
    common = math.lcm(*repeats)
    if common == 1 or common > MAX_THREADS:
        return THREADS
    # With a multiple of the period, a thread's channel is the same in every pack, and its loads happen once.
    return min(range(common, MAX_THREADS + 1, common), key=lambda n: (n < 128, n % 32 != 0, abs(n - THREADS)))


def access(period: Period, width: int, threads: int) -> Access:
    """Return how a thread of an elementwise kernel indexes a Channel argument."""
    if period.size == 1:
        return Access(once=True)
    repeat = _repeat(period, width)
    packed = _packed(period, width)
    return Access(
        divides=not packed and period.inner != width,
        wraps=period.outer > 1,
        packed=packed,
        once=repeat > 0 and threads % repeat == 0,
    )


def extras(call: Call, periods: Mapping[str, Period], width: int) -> tuple[tuple[Any, ...], ...]:
    """Return divisor and modulus of each Channel argument in packs; nothing for other arguments."""
    dividers: list[tuple[Any, ...]] = []
    for name in call.expression.parameters:
        period = periods.get(name)
        if period is None:
            dividers.append(())
            continue
        packed = _packed(period, width)
        inner, size = max(1, period.inner // width), period.size // width if packed else period.size
        dividers.append((np.uint32(inner), divider(inner), np.uint32(size), divider(size)))
    return tuple(dividers)


def _unroll(call: Call, packs: int, channels: Sequence[Access]) -> int:
    """Return the packs per thread: several if they share loads, else one, which is fastest."""
    shared = any(channel.once and channel.wraps for channel in channels)
    slow = any(name in formula_text(call.expression) for name in SLOW_FUNCTIONS)
    return 4 if shared and packs >= FEW_PACKS and not slow else 1


class CudaElementwise(ElementwisePrimitives, CudaMemory):
    """`ElementwisePrimitives` of the GPU."""

    def apply(
        self, expression: Expression, inputs: Sequence[Array | float], outputs: Sequence[Array], axis: int = 1
    ) -> None:
        apply(expression, inputs, outputs, axis, self._scratch)

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        here = destination.data.ptr
        # A source that is the destination comes first: a later launch would find it overwritten.
        remaining = sorted(map(raw, sources), key=lambda a: a.data.ptr != here)
        assert len({a.dtype for a in remaining}) == 1, "sources are of one dtype"
        while len(remaining) > 1:
            now, remaining = remaining[:MAX_SOURCES], [destination, *remaining[MAX_SOURCES:]]
            tuning = TOTAL if len(now) < 4 else TOTAL_OF_MANY
            layout = flat_layout((*now, raw(destination)), tuning.width)
            plan = make_launch(
                "add_n", layout, tuning, {"D": c_type(now[0]), "Y": c_type(destination)}, SOURCES=len(now)
            )
            plan.launch(*now, *[now[0]] * (MAX_SOURCES - len(now)), destination)


SPLIT_BLOCKS = 4 * MULTIPROCESSORS
"""Target number of blocks of a reduction. Fixed, so that the summation order does not depend on the device."""

PACKS_EACH = 8
"""Minimum packs per thread before a reduction is split further."""

LOADS = 8
"""Packs that a thread loads before it adds; half as many for columns, which have one sum each."""

SEGMENT = 128
"""Bytes of a row per block: one memory transaction, so that few blocks share a result."""


class ReductionLaunch(NamedTuple):
    """A planned reduction.

    Args:
        launch: its kernel.
        partial: number of partial sums; 0 if each result is computed by one block.
        tickets: number of results' groups that blocks share.
    """

    launch: FormulaLaunch
    partial: int
    tickets: int


def reduce(
    formula: Expression,
    inputs: Sequence[Argument],
    outputs: Sequence[Array],
    axis: int,
    accumulate: bool,
    scratch: Scratch,
) -> None:
    """outputs (+)= sums of formula(*inputs), see `Backend.reduce`."""
    if outputs[0].size == 0:
        return
    shape = _each_shape(formula, inputs)
    if math.prod(shape) == 0:
        for out in outputs if not accumulate else ():
            fill(out, 0)
        return
    plan = _reduction_launch(make_call(formula, inputs, outputs, axis), shape)
    if plan is None:
        _reduce_general(formula, inputs, outputs, axis, accumulate, scratch)
        return
    partial = scratch.get("partial sums", plan.partial, "float64")
    tickets = scratch.tickets(plan.tickets if plan.partial else 1)
    plan.launch.run(inputs, outputs, partial, tickets, np.int32(accumulate))


def _each_shape(formula: Expression, inputs: Sequence[Any]) -> tuple[int, ...]:
    return next(tuple(v.shape) for v, k in zip(inputs, formula.kinds, strict=True) if k is Kind.EACH)


@lru_cache(maxsize=4096)
def _reduction_launch(call: Call, shape: tuple[int, ...]) -> ReductionLaunch | None:
    """Return the plan of a reduction, or None if the outputs or a Channel argument have no period."""
    target = find_period(shape, call.outputs[0].shape, call.axis)
    periods = {name: period for name, period in call.periods(shape).items() if period is not None}
    if target is None or len(periods) < len(call.of_kind(Kind.CHANNEL)):
        return None
    if _common_images((target, *periods.values())) != target.images:
        return None
    call.check()
    if target.size == 1:
        target = Period(1, 1, math.prod(shape))
    by_columns = target.inner == 1 and target.size > 1
    span = target.size if by_columns else target.inner
    width = pack_width(call, tuple(call.of_kind(Kind.EACH).values()), periods, span)
    unroll = max(1, LOADS // len(call.of_kind(Kind.EACH)) // (2 if by_columns else 1))
    variant = Variant(
        call.each_types(),
        call.output_types(),
        width,
        unroll,
        index_type(math.prod(shape) // width),
        call.device_scalars(),
        tuple(_access(p, target, width, by_columns) for p in periods.values()),
        target.images > 1,
    )
    return (_plan_columns if by_columns else _plan_segments)(call, variant, target, extras(call, periods, width))


def _access(period: Period, target: Period, width: int, by_columns: bool) -> Access:
    """Return how a thread indexes a Channel argument: by its result's number if both have the same period."""
    if period == target:
        return Access(wraps=True, packed=by_columns and width > 1, once=True)
    return replace(access(period, width, 1), once=period.size == 1)


def _text(text: str) -> str:
    return kernel_text("common") + kernel_text("reduce") + text


def _plan_columns(call: Call, variant: Variant, target: Period, more: tuple[tuple[Any, ...], ...]) -> ReductionLaunch:
    rows, packs = target.outer, target.size // variant.width
    item = min(s.item for s in call.of_kind(Kind.EACH).values())
    across = min(32, SEGMENT // (variant.width * item), 1 << (packs - 1).bit_length())
    grid = -(-packs // across)
    # As many blocks as fill a device of MULTIPROCESSORS, unless a thread would have too few packs for the second step.
    images = target.images
    splits = max(1, min(SPLIT_BLOCKS // (grid * images), -(-rows // (THREADS // across * PACKS_EACH))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    kernel = compiled(_text(reduce_columns_text(call.expression, variant, across)), "reduce_")
    head = (np.uint32(rows), np.uint32(packs), np.uint32(each))
    launch = FormulaLaunch(kernel, (grid, splits, images), (THREADS,), head, more)
    partial = len(call.outputs) * splits * target.size * images
    return ReductionLaunch(launch, partial if splits > 1 else 0, grid * images)


def _plan_segments(call: Call, variant: Variant, target: Period, more: tuple[tuple[Any, ...], ...]) -> ReductionLaunch:
    inner, index = target.inner // variant.width, variant.index
    length = target.outer * inner
    threads = min(THREADS, max(32, 1 << (-(-length // variant.unroll) - 1).bit_length()))
    splits = max(1, min(SPLIT_BLOCKS // target.size, -(-length // (threads * PACKS_EACH))))
    each = -(-length // splits)
    splits = -(-length // each)
    kernel = compiled(_text(reduce_segments_text(call.expression, variant)), "reduce_")
    head = (
        count_argument(target.outer, index),
        count_argument(inner, index),
        divider(min(inner, 2**31)),
        count_argument(each, index),
    )
    launch = FormulaLaunch(kernel, (target.size, splits), (threads,), head, more)
    return ReductionLaunch(launch, len(call.outputs) * splits * target.size if splits > 1 else 0, target.size)


def _reduce_general(
    formula: Expression,
    inputs: Sequence[Argument],
    outputs: Sequence[Array],
    axis: int,
    accumulate: bool,
    scratch: Scratch,
) -> None:
    """Reduce rare geometries in three steps: apply the formula, transpose into segments, sum."""
    shape = _each_shape(formula, inputs)
    values = [view(scratch.get(f"values {k}", math.prod(shape)), shape) for k in range(len(outputs))]
    apply(formula, inputs, values, axis, scratch)
    for value, out in zip(values, outputs, strict=True):
        kept = [axis + a for a in memory_axes(out.ndim) if out.shape[a] != 1]
        order = kept + [a for a in range(len(shape)) if a not in kept]
        moved = scratch.get("segments", value.size)
        copy(value.transpose(order), moved.reshape([shape[a] for a in order]))
        reduce(identity, (moved.reshape(out.size, -1),), (flat(out),), 0, accumulate, scratch)


def is_finite(array: Array, scratch: Scratch) -> bool:
    """Return whether every element is finite. Waits for the device."""
    flag = scratch.get("finite flag", 1, "int32")
    fill(flag, 0)
    width = widest([array.size, math.gcd(int(array.data.ptr), 16) // array.itemsize], 16 // array.itemsize)
    packs = array.size // width
    blocks = min(-(-max(packs, 1) // THREADS), MAX_BLOCKS)
    kernel = library_kernel("finite", "find_non_finite", defines(TYPE=c_type(array), WIDTH=width))
    if packs:
        kernel((blocks,), (THREADS,), (raw(array), np.uint64(packs), flag))
    return not int(flag.get()[0])


class CudaReduction(ReductionPrimitives, CudaMemory):
    """`ReductionPrimitives` of the GPU."""

    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Array | float],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        reduce(expression, inputs, outputs, axis, accumulate, self._scratch)

    def all_finite(self, array: Array) -> bool:
        with self._on_stream():
            return is_finite(array, self._scratch)
