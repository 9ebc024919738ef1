"""Batch normalisation, activation gradients and local response normalisation on the GPU.

Each primitive is one launch, including its sums, and reads and writes every array once. `expression.py` defines
the partitioning into blocks and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np

from caffepy.backend.cuda.codegen import formula_of
from caffepy.backend.cuda.compiler import (
    THREADS,
    c_type,
    compile_side_by_side,
    defines,
    device_number,
    divider,
    launch,
    library_kernel,
)
from caffepy.backend.cuda.expression import Layout, Tuning, find_layout, flat_layout, make_launch
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX, vector_width
from caffepy.backend.cuda.memory import CudaMemory, raw
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.interface import NormalisationPrimitives
from caffepy.backend.types import Array, BatchNormState, LrnWindow

MAX_GRADIENTS = 4
"""Maximum gradients per launch of `backward_sums`; each takes registers of every thread."""


FORWARD = Tuning(128, 4)
FORWARD_RESIDUAL = Tuning(128, 4, width=8)
DATA = Tuning(128, 4)
ACTIVATION = Tuning(128, 4)
MEASURE = Tuning(1024, 8, sums=True)
SUMS = Tuning(1024, 4, sums=True)
SUMS_OF_MANY = Tuning(1024, 2, sums=True)
ACTIVATION_AND_BIAS = Tuning(1024, 4, sums=True)


LARGE_SIZE = 32
"""Window size (in channels) above which the kernel loops over the window instead of unrolling it."""


def _launch_lrn(name: str, arrays: tuple[Array, ...], window: LrnWindow) -> None:
    channels, large = arrays[0].shape[1], window.size > LARGE_SIZE
    assert len({a.dtype for a in arrays}) == 1, "LRN's arrays must have one dtype"
    width = 1 if large else vector_width(channels, arrays)
    count = arrays[0].size // width
    if count == 0:
        return
    assert count <= MAX_INDEX, f"{arrays[0].shape}: too large for one LRN launch"
    text = defines(STORED=c_type(arrays[0]), WIDTH=width, SIZE=window.size, LARGE=int(large))
    packs = channels // width
    numbers = map(np.float32, (window.alpha / window.size, window.beta, window.k))
    arguments = (*map(raw, arrays), np.uint32(packs), divider(packs), *numbers, np.uint32(count))
    library_kernel("lrn", name, text)((-(-count // THREADS),), (THREADS,), arguments)


def _sums_tuning(sources: int, halves: bool, total: bool) -> Tuning:
    # Loads of halves take half of the registers, so more rows are under way.
    return SUMS if not total or (sources <= 2 and halves) else SUMS_OF_MANY


@cache
def _compile_training_kernels(layout: Layout, wide: Layout, kind: str, device: int) -> None:
    """Compile side by side what normalisations of one dtype need in a training pass, most of it in every net."""
    forward = partial(
        make_launch, "normalise_forward", types={"X": kind, "R": kind, "Y": kind}, entry="normalise_forward"
    )
    sums = partial(make_launch, "normalise_sums", layout, types={"X": kind, "D": kind})
    gradient = partial(make_launch, "normalise_gradient", layout, DATA, {"X": kind, "D": kind, "Y": kind})
    plain = (partial(forward, layout, FORWARD, RESIDUAL=False, RELU=relu, MASK=False) for relu in (False, True))
    added = (partial(forward, wide, FORWARD_RESIDUAL, RESIDUAL=True, RELU=relu, MASK=relu) for relu in (False, True))
    alone = (partial(sums, tuning=SUMS, SOURCES=1, RELU=relu, TOTAL=False) for relu in (0, 2))
    tuning = _sums_tuning(2, kind != "float", True)
    several = (partial(sums, tuning=tuning, SOURCES=n, RELU=relu, TOTAL=True) for n in (1, 2) for relu in (0, 1))
    measure = partial(make_launch, "normalise_measure", layout, MEASURE, {"X": kind}, "measure")
    gradients = (partial(gradient, RELU=relu) for relu in (False, True))
    compile_side_by_side([measure, *plain, *added, *alone, *several, *gradients])


class CudaNormalisation(NormalisationPrimitives, CudaMemory):
    """`NormalisationPrimitives` of the GPU."""

    keeps_lrn_scale = False

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        layout, kind = find_layout((x,), (), MEASURE.width), c_type(x)
        wide = find_layout((x,), (), FORWARD_RESIDUAL.width)
        _compile_training_kernels(layout.without_sizes(), wide.without_sizes(), kind, device_number())
        plan = make_launch("normalise_measure", layout, MEASURE, {"X": kind}, "measure")
        plan.launch(
            raw(x),
            *plan.between_blocks(self._scratch),
            n.mean,
            n.inverse,
            n.sum_mean,
            n.sum_variance,
            n.count,
            float(n.epsilon),
            float(n.fraction),
        )

    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        arrays = (n.mean, n.inverse, n.sum_mean, n.sum_variance, n.count)
        numbers = (float(n.epsilon), float(n.fraction), elements, n.mean.size)
        launch(library_kernel("statistics", "measure_sums"), n.mean.size, (raw(sums), *arrays, *numbers))

    def batch_norm_load(self, n: BatchNormState) -> None:
        arrays = (n.sum_mean, n.sum_variance, n.count, n.mean, n.inverse)
        kernel = library_kernel("statistics", "load_statistics")
        launch(kernel, n.mean.size, (*arrays, float(n.epsilon), n.mean.size))

    def batch_norm_forward(
        self,
        x: Array,
        n: BatchNormState,
        y: Array,
        residual: Array | None = None,
        relu: bool = False,
        mask: Array | None = None,
    ) -> None:
        other = x if residual is None else residual
        arrays, per_channel = (raw(x), raw(other), raw(y)), (n.mean, n.inverse, n.scale, n.bias)
        tuning = FORWARD if residual is None else FORWARD_RESIDUAL
        layout = find_layout(arrays, per_channel, tuning.width)
        # Where rows are not whole bytes of the mask, threads of two rows would write one byte.
        whole_bytes = layout.width > 1 and layout.columns % 8 == 0
        by_bits = mask is not None and not whole_bytes
        plan = make_launch(
            "normalise_forward",
            layout,
            tuning,
            {"X": c_type(x), "R": c_type(other), "Y": c_type(y)},
            "normalise_forward_bits" if by_bits else "normalise_forward",
            RESIDUAL=residual is not None,
            RELU=relu,
            MASK=mask is not None,
        )
        inputs = (x, *per_channel, other, y, y if mask is None else mask)
        if by_bits:
            size = np.uint64(x.size)
            launch(plan.kernel, -(-x.size // 8), (*inputs, layout.columns, layout.inner, size))
        else:
            plan.launch(*inputs)

    def batch_norm_backward_sums(
        self,
        x: Array,
        dys: Sequence[Array],
        n: BatchNormState,
        sums: Sequence[Array],
        relu: bool = False,
        mask: Array | None = None,
        total: Array | None = None,
    ) -> None:
        dys = self._limit_gradients(dys, total)
        arrays = [raw(a) for a in (x, *dys, *(() if total is None else (total,)))]
        assert len({a.dtype for a in arrays[1:]}) == 1, "gradients and their total are of one dtype"
        assert total is not None or len(dys) == 1, "several gradients need `total`"
        per_channel = (n.mean, n.inverse, n.scale, n.bias)
        tuning = _sums_tuning(len(dys), x.itemsize == dys[0].itemsize == 2, total is not None)
        plan = make_launch(
            "normalise_sums",
            find_layout(arrays, per_channel, tuning.width),
            tuning,
            {"X": c_type(x), "D": c_type(dys[0])},
            SOURCES=len(dys),
            RELU=0 if not relu else 2 if mask is None else 1,
            TOTAL=total is not None,
        )
        sources = [*dys, *[dys[0]] * (MAX_GRADIENTS - len(dys))]
        out = dys[0] if total is None else total
        relu_source = x if mask is None else mask
        plan.launch(x, *sources, *per_channel, relu_source, out, *sums, *plan.between_blocks(self._scratch))

    def _limit_gradients(self, dys: Sequence[Array], total: Array | None) -> Sequence[Array]:
        """Return at most as many gradients as one launch adds; the others are added to `total`, which replaces them."""
        if len(dys) <= MAX_GRADIENTS:
            return dys
        assert total is not None, "several gradients need `total`"
        here = total.data.ptr
        # Keep the operand that aliases the total.
        first, *others = sorted(dys, key=lambda a: a.data.ptr != here)
        self.add_n([first, *others[MAX_GRADIENTS - 1 :]], total)
        return [total, *others[: MAX_GRADIENTS - 1]]

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        per_channel = (n.mean, n.inverse, n.scale, n.bias, *sums)
        layout = find_layout((raw(x), raw(dy), raw(dx)), per_channel, DATA.width)
        plan = make_launch(
            "normalise_gradient", layout, DATA, {"X": c_type(x), "D": c_type(dy), "Y": c_type(dx)}, RELU=relu
        )
        plan.launch(x, dy, *per_channel, dx, 1.0 / max(layout.rows, 1))

    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        formula = formula_of(expression, Kind.EACH, Kind.EACH)
        arrays = (raw(y), raw(dy), raw(dx))
        types = {"X": c_type(y), "D": c_type(dy), "Y": c_type(dx)}
        if dbias is None:
            layout = flat_layout(arrays, ACTIVATION.width)
            plan = make_launch("activation_gradient", layout, ACTIVATION, types, formula=formula, BIASED=False)
            plan.launch(y, dy, dx, dx, False, dx, dx)
        else:
            layout = find_layout(arrays, (), ACTIVATION_AND_BIAS.width)
            plan = make_launch("activation_gradient", layout, ACTIVATION_AND_BIAS, types, formula=formula, BIASED=True)
            plan.launch(y, dy, dx, dbias, accumulate, *plan.between_blocks(self._scratch))

    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        assert scale is None, "the backward pass recomputes the scale"
        _launch_lrn("lrn_forward", (x, y), window)

    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        assert y is None and scale is None, "the backward pass recomputes y and scale"
        _launch_lrn("lrn_backward", (x, dy, dx), window)
