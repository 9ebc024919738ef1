"""The CPU backend: NumPy for memory, machine code made by numba for everything that computes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from caffepy.backend import layout
from caffepy.backend.cpu import lrn as cpu_lrn
from caffepy.backend.cpu import random as cpu_random
from caffepy.backend.cpu import softmax as cpu_softmax
from caffepy.backend.cpu.blas import BLAS
from caffepy.backend.cpu.convolution.choice import plan_convolution
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.copying import (
    are_lines,
    are_whole_numbers,
    copy_as_lines,
    copy_images,
    copy_whole_numbers,
    is_images,
)
from caffepy.backend.cpu.elementwise import apply_channels, apply_flat, reduce_channels, reduce_flat
from caffepy.backend.cpu.gemm.product import Gemm
from caffepy.backend.cpu.input import CpuInput
from caffepy.backend.cpu.jit.cpus import cpu_count
from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, kernel
from caffepy.backend.cpu.jit.recording import CURRENT, note_host_work, record_all
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.memory import available_memory, give_back_memory
from caffepy.backend.cpu.normalise.primitives import CpuNormalisation
from caffepy.backend.cpu.pooling import averages, maxima
from caffepy.backend.cpu.recurrent import CpuRecurrent
from caffepy.backend.cpu.rows import CpuRows
from caffepy.backend.cpu.workspace import Workspace, aligned_zeros
from caffepy.backend.device_scalars import HostAsyncCopy, Synchronous
from caffepy.backend.elementwise import Expression, Kind
from caffepy.backend.handles import AsyncCopy, Convolution
from caffepy.backend.layout import CHANNELS_LAST, is_plain, memory_order
from caffepy.backend.types import Array, Counter, Geometry, LrnWindow, RandomStream
from caffepy.errors import DeviceError, OutOfMemoryError


@kernel
def _add(begin: Int, end: Int, source: Floats, destination: Floats) -> None:
    for i in range(begin, end):
        destination[i] += source[i]


@kernel
def _count_not_finite(begin: Int, end: Int, bits: Ints, block: Int, size: Int, counts: Ints) -> None:
    """Items are blocks of elements; a float32 whose exponent bits are all ones is infinite or no number."""
    for item in range(begin, end):
        count = 0
        for i in range(item * block, min(size, (item + 1) * block)):
            count += 1 if (bits[i] & 0x7F800000) == 0x7F800000 else 0
        counts[item] = count


LARGE = 2**28
"""Bytes of an array before whose allocation the machine is asked what it has."""


class CpuBackend(CpuInput, CpuRecurrent, CpuRows, Synchronous, CpuNormalisation):
    """One solver thread's share of the machine's cores.

    Args:
        threads: how many; None takes all that the process may use (its CPU affinity).

    Raises:
        DeviceError: fewer than one thread.
    """

    name = "cpu"
    asynchronous = False
    records = True

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise DeviceError(f"{threads} CPU threads are too few: give at least 1")
        super().__init__()
        self.threads = threads or cpu_count()
        self._workspace = Workspace()
        self._gemm = Gemm(self.threads, self._workspace)

    # -- the device ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with BLAS.threads(self.threads):
            yield

    def close(self) -> None:
        """Give back the workspace; the threads are the process's."""
        self._workspace.clear()

    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        return HostAsyncCopy(array)

    def record(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return record_all(works)

    def device_description(self) -> str:
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}"

    # -- memory -------------------------------------------------------------------------------------

    def trim(self) -> None:
        give_back_memory()

    def available_memory(self) -> int | None:
        return available_memory()

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            # Linux would give memory that it does not have, and kill the process that uses it.
            if size > LARGE and size > (self.available_memory() or size):
                raise MemoryError
            return layout.view(aligned_zeros((math.prod(shape),), dtype), shape)
        except MemoryError:
            raise OutOfMemoryError(
                f"{self.device_description()}: out of memory: {size / 2**30:.2f} GiB for an array of shape {shape} "
                "could not be had",
                "use a smaller batch_size",
            ) from None

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        return layout.view(flat, shape)

    def flat(self, array: Array) -> Array:
        in_memory = memory_order(array)
        assert in_memory.flags.c_contiguous, f"shape {array.shape}, strides {array.strides}: a slice or foreign order"
        return in_memory.reshape(-1)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        if tuple(array.shape) == tuple(shape):
            return array
        if array.flags.c_contiguous and is_plain(shape):
            return self.view(array.reshape(-1), shape)
        note_host_work()
        result = self.zeros(shape, array.dtype.name)
        if len(shape) in CHANNELS_LAST:
            result[...] = array.reshape(shape)
        else:
            result.reshape(array.shape)[...] = array
        return result

    def fill(self, array: Array, value: float) -> None:
        note_host_work()
        array[...] = value

    def copy(self, source: Array, destination: Array) -> None:
        if is_images(source, destination):
            copy_images(self.threads, source, destination)
        elif CURRENT.recording is not None and are_lines(source, destination):  # else NumPy is as fast
            copy_as_lines(self.threads, source, destination)
        elif are_whole_numbers(source, destination):
            copy_whole_numbers(self.threads, source, destination)
        else:
            note_host_work()
            destination[...] = source

    def add(self, source: Array, destination: Array) -> None:
        if self._dense(source) and self._dense(destination) and source.dtype == np.float32:
            _add.run(self.threads, source.size, GRAIN, source, destination)
        else:
            note_host_work()
            destination += source

    def from_host(self, host: Any, destination: Array) -> None:
        assert np.shape(host) == destination.shape, (np.shape(host), destination.shape)
        self.copy(host, destination)

    def to_host(self, array: Array) -> Any:
        note_host_work()
        return np.array(array, order="C", copy=True)

    def _dense(self, array: Array) -> bool:
        return bool(memory_order(array).flags.c_contiguous)

    # -- elementwise and reductions -----------------------------------------------------------------

    def _extents(self, shape: tuple[int, ...], axis: int, axes: int) -> tuple[int, int, int] | None:
        """(outer, channels, inner) of the axes [axis, axis + axes) in memory order; None if not adjacent there."""
        last = len(shape) in CHANNELS_LAST
        if axes == 0 or (axis == 0 and axes in (1, len(shape)) if last else axes not in CHANNELS_LAST):
            return (
                math.prod(shape[:axis]), math.prod(shape[axis : axis + axes]), math.prod(shape[axis + axes :])
            )  # fmt: skip
        if last and (axis, axes) in ((1, 1), (0, 2)):
            return shape[0] * math.prod(shape[2:]), shape[1], 1
        return None

    def _samples(self, shape: tuple[int, ...], axis: int, axes: int) -> int:
        """How many samples have numbers of their own for each channel, whose pixels lie between these in memory."""
        return shape[0] if len(shape) in CHANNELS_LAST and (axis, axes) == (0, 2) else 1

    def _spread(self, channel: Array, shape: tuple[int, ...], axis: int) -> Array:
        """A `Channel` argument as an array of the full shape."""
        note_host_work()
        full = self.zeros(shape)
        full[...] = channel.reshape(channel.shape + (1,) * (len(shape) - axis - channel.ndim))
        return full

    def apply(self, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Array], axis: int = 1) -> None:
        shape = outputs[0].shape
        arguments: list[Any] = list(inputs)
        extents: tuple[int, int, int] | None = None
        samples = 1
        channels = [i for i, kind in enumerate(expression.kinds) if kind is Kind.CHANNEL]
        if channels:
            channel = arguments[channels[0]]
            extents = self._extents(shape, axis, channel.ndim)
            samples = self._samples(shape, axis, channel.ndim)
            for i in channels:
                assert arguments[i].shape == shape[axis : axis + arguments[i].ndim], (arguments[i].shape, shape, axis)
                if extents is None:
                    arguments[i] = self._spread(arguments[i], shape, axis)
        for i, (argument, kind) in enumerate(zip(arguments, expression.kinds, strict=True)):
            if kind is Kind.EACH:
                assert argument.shape == shape, (expression.name, argument.shape, shape)
            if kind is Kind.SCALAR:
                arguments[i] = float(argument)
            else:
                self._check_dense(argument)
        self._check_dense(*outputs)
        if channels and extents is None:
            expression = _all_each(expression)
        if extents is None:
            apply_flat(self.threads, expression, arguments, outputs)
        else:
            apply_channels(self.threads, expression, arguments, outputs, extents, samples)

    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        note_host_work()  # adds up what blocks have
        kinds = expression.kinds
        inputs = [float(a) if k is Kind.SCALAR else a for a, k in zip(inputs, kinds, strict=True)]
        shape = next(a.shape for a, k in zip(inputs, kinds, strict=True) if k is Kind.EACH)
        kept = outputs[0].shape
        assert all(output.shape == kept for output in outputs)
        channels = [a for a, k in zip(inputs, expression.kinds, strict=True) if k is Kind.CHANNEL]
        axes = channels[0].ndim if channels else len(kept)
        extents = self._extents(shape, axis, axes)
        if extents is None:
            sums = self._reduce_general(expression, inputs, shape, axis, kept)
        else:
            self._check_dense(*(a for a, k in zip(inputs, expression.kinds, strict=True) if k is not Kind.SCALAR))
            if axes == 0:
                sums = reduce_flat(self.threads, expression, inputs, math.prod(shape))
            else:
                samples = self._samples(shape, axis, axes)
                if samples > 1 and channels:  # the sums' kernel knows one number for each channel
                    sums = self._reduce_general(expression, inputs, shape, axis, kept)
                else:
                    sums = reduce_channels(self.threads, expression, inputs, extents, samples)
            if kept == ():
                sums = [s.sum() for s in sums]
        with np.errstate(over="ignore"):  # a sum beyond float32 is infinite there, as on a GPU
            for total, output in zip(sums, outputs, strict=True):
                if accumulate:
                    total = total + self.flat(output).reshape(np.shape(total))
                self.flat(output)[...] = total

    def _reduce_general(
        self, expression: Expression, inputs: Sequence[Any], shape: tuple[int, ...], axis: int, kept: tuple[int, ...]
    ) -> list[Any]:
        """Sums over axes that are scattered in memory: by way of the whole array of values."""
        values = [self.zeros(shape) for _ in range(expression.output_count)]
        self.apply(expression, inputs, values, axis)
        summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + len(kept))
        return [self._in_memory_order(v.sum(axis=summed, dtype=np.float64)) for v in values]

    def _in_memory_order(self, array: Array) -> Array:
        return np.ascontiguousarray(memory_order(array)).reshape(-1)

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        self._gemm(a.T if transpose_a else a, b.T if transpose_b else b, out, accumulate)

    # -- windows ------------------------------------------------------------------------------------

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        assert dtype == "float32", f"the CPU computes in float32, not {dtype}"
        return plan_convolution(self.threads, self._workspace, x_shape, weights_shape, geometry)

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        if isinstance(plan, TileConvolution):
            plan.forward(x, weights, bias, y, relu, residual=residual)
        else:
            super().convolve_and_add(plan, x, weights, bias, residual, y, relu)

    def keep_weights(self, plan: Convolution, weights: Array, given: Array | None = None) -> bool:
        if not isinstance(plan, TileConvolution):
            return False
        plan.keep(weights)
        if given is not None:
            plan.use_kept_for(given)
        return True

    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        self._check_dense(x, y, mask)
        maxima.pool_max_forward(self.threads, x, y, mask, geometry)

    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        self._check_dense(dy, mask, dx)
        maxima.pool_max_backward(self.threads, dy, mask, dx)

    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        self._check_dense(x, y)
        averages.pool_average_forward(self.threads, self._workspace, x, y, geometry)

    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        self._check_dense(dy, dx)
        averages.pool_average_backward(self.threads, self._workspace, dy, dx, geometry)

    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        self._check_dense(x, y, scale)
        cpu_lrn.lrn_forward(self.threads, x, y, scale, window)

    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        self._check_dense(x, y, scale, dy, dx)
        cpu_lrn.lrn_backward(self.threads, x, y, scale, dy, dx, window)

    def _check_dense(self, *arrays: Array) -> None:
        for array in arrays:
            assert self._dense(array), f"shape {array.shape}, strides {array.strides}: a slice or foreign order"

    # -- softmax ------------------------------------------------------------------------------------

    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        cpu_softmax.softmax_forward(self.threads, x, y, axis)

    def softmax_backward(self, y: Array, dy: Array, dx: Array, axis: int) -> None:
        cpu_softmax.softmax_backward(self.threads, y, dy, dx, axis)

    def softmax_loss_forward(
        self,
        x: Array,
        labels: Array,
        probabilities: Array,
        totals: Array,
        bad_label: Array,
        axis: int,
        ignore_label: int | None,
    ) -> None:
        cpu_softmax.softmax_forward(self.threads, x, probabilities, axis)
        cpu_softmax.loss_forward(self.threads, probabilities, labels, totals, bad_label, axis, ignore_label)

    def softmax_loss_backward(
        self,
        probabilities: Array,
        labels: Array,
        dx: Array,
        totals: Array | None,
        axis: int,
        ignore_label: int | None,
        scale: float,
    ) -> None:
        if totals is not None:
            scale = scale / max(float(totals[1]), 1.0)
        cpu_softmax.loss_gradient(self.threads, probabilities, labels, dx, axis, ignore_label, scale)

    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        cpu_softmax.smooth_forward(self.threads, probabilities, labels, totals, axis, ignore_label, smoothing)

    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        if totals is not None:
            scale = scale / max(float(totals[1]), 1.0)
        cpu_softmax.smooth_gradient(self.threads, labels, dx, axis, ignore_label, scale)

    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        cpu_softmax.label_ranks(self.threads, x, labels, ranks, bad_label, axis, higher_wins)

    # -- random numbers -----------------------------------------------------------------------------

    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        self._check_dense(out)
        note_host_work()  # the counter is another in each pass
        cpu_random.random_uniform(self.threads, out, stream, *counter)

    # -- health -------------------------------------------------------------------------------------

    def all_finite(self, array: Array) -> bool:
        note_host_work()
        if not self._dense(array):
            return bool(np.isfinite(array).all())
        block = 1 << 16
        blocks = -(-array.size // block)
        counts = np.zeros(blocks, np.int32)
        _count_not_finite.run(self.threads, blocks, 2, array, block, array.size, counts)
        return not counts.any()


_EACH: dict[Expression, Expression] = {}


def _all_each(expression: Expression) -> Expression:
    """The same formula with its `Channel` arguments taken element by element."""
    if expression not in _EACH:
        copy = Expression(expression.function)
        copy.kinds = [Kind.EACH if kind is Kind.CHANNEL else kind for kind in copy.kinds]
        _EACH[expression] = copy
    return _EACH[expression]
