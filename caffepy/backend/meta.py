"""A backend without data: arrays are shapes, and primitives record which arrays they read and write at each step.

`caffepy.net.memory_plan` derives from the record which arrays of a net are never live together. A net is built and run
on this backend as on any device, in milliseconds and without allocating.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caffepy.backend.interface import Backend
from caffepy.backend.types import (
    Array,
    AsyncCopy,
    BoxLoss,
    BoxLossSettings,
    Convolution,
    Geometry,
    Synchronous,
    element_dtype,
    gpu_workspace,
    is_plain,
    spatial_output,
)

SETUP = -1
"""The step number during setup, before the first step."""

Box = tuple[tuple[int, int], ...]
"""A region of an array: begin and end along each axis."""


@dataclass(eq=False)
class Memory:
    """One allocation and its live range.

    Args:
        shape: its shape.
        dtype: its element type, as passed to `Backend.zeros`.
        made: the step that allocated it.
    """

    shape: tuple[int, ...]
    dtype: str
    made: int
    first: int | None = None
    """The first step that uses it."""
    last: int | None = None
    """The last step that uses it."""
    lasting: bool = False
    """Whether it is written during setup, or read before any step has written it: its initial contents matter."""
    _written: list[Box] = field(default_factory=list)
    _complete: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(element_dtype(self.dtype)).itemsize

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)

    def read(self, step: int, part: Box | None) -> None:
        """Record a read of `part`; None: an unknown part."""
        self._use(step)
        if not self._complete and part not in self._written:
            self.lasting = True

    def write(self, step: int, part: Box | None) -> None:
        """Record that `part` is overwritten."""
        self._use(step)
        if self.lasting or self._complete or part is None or any(_overlap(part, other) for other in self._written):
            return
        self._written.append(part)
        self._complete = sum(map(_count, self._written)) >= math.prod(self.shape)

    def _use(self, step: int) -> None:
        if step == SETUP:
            self.lasting = True
        self.first = step if self.first is None else self.first
        self.last = step


def _overlap(a: Box, b: Box) -> bool:
    return all(begin < other_end and other < end for (begin, end), (other, other_end) in zip(a, b, strict=True))


def _count(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


class MetaArray:
    """A shape over an allocation, with the attributes and methods of an array that layers use.

    Args:
        memory: the allocation.
        shape: the logical shape.
        part: region of the allocation; None if unknown.
    """

    def __init__(self, memory: Memory, shape: tuple[int, ...], part: Box | None) -> None:
        self.memory = memory
        self.shape = tuple(int(size) for size in shape)
        self.part = part

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(element_dtype(self.memory.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def reshape(self, *shape: Any) -> MetaArray:
        """Return a view, as NumPy's `reshape`."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // max(-math.prod(sizes), 1)
        assert math.prod(sizes) == self.size, (self.shape, shape)
        return MetaArray(self.memory, tuple(sizes), self.part)

    def transpose(self, *axes: int) -> MetaArray:
        order = axes or tuple(reversed(range(self.ndim)))
        return MetaArray(self.memory, tuple(self.shape[axis] for axis in order), self.part)

    @property
    def T(self) -> MetaArray:
        return self.transpose()

    def __getitem__(self, key: Any) -> MetaArray:
        shape, box = [], []
        keys = key if isinstance(key, tuple) else (key,)
        keys += (slice(None),) * (self.ndim - len(keys))
        for size, one in zip(self.shape, keys, strict=True):
            if isinstance(one, slice):
                begin, end, _ = one.indices(size)
                box.append((begin, max(begin, end)))
                shape.append(box[-1][1] - begin)
            else:
                box.append((one % size, one % size + 1))
        if self.part == self.memory.whole and self.shape == self.memory.shape:
            return MetaArray(self.memory, tuple(shape), tuple(box))
        return MetaArray(self.memory, tuple(shape), self.part if math.prod(shape) == self.size else None)


def _arrays(values: Iterable[Any]) -> Iterator[MetaArray]:
    """Yield the arrays among arguments, which may be numbers, None or sequences of arrays."""
    for value in values:
        if isinstance(value, MetaArray):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _arrays(value)


def _primitive(name: str, reads: Sequence[str] = (), writes: Sequence[str] = (), sums: Sequence[str] = ()) -> Any:
    """Return a method that records the memory accesses of the primitive `name`."""
    signature = inspect.signature(getattr(Backend, name))

    def note(self: MetaBackend, *positional: Any, **named: Any) -> None:
        given = signature.bind(self, *positional, **named).arguments

        def values(names: Sequence[str]) -> Iterator[Any]:
            for path in names:
                argument, _, part = path.partition(".")
                value = given.get(argument)
                yield getattr(value, part) if part else value

        accumulate = sums if given.get("accumulate") else ()
        self.note(values([*reads, *accumulate]), values([*writes, *sums]))

    note.__name__ = name
    note.__doc__ = "Record the memory accesses of the primitive."
    return note


_STATISTICS = ("n.mean", "n.inverse")
_NORMAL = (*_STATISTICS, "n.scale", "n.bias")
_MATRIX = ("matrix.begins", "matrix.columns", "matrix.weights")
_RUNNING = ("n.sum_mean", "n.sum_variance", "n.count")


class MetaBackend(Synchronous, Backend):
    """A backend that behaves as a GPU to layers and records memory accesses.

    Args:
        like: the backend whose properties layers shall see; None: a GPU's.
    """

    asynchronous = True
    holds_values = False

    def __init__(self, like: Backend | None = None) -> None:
        self.name = like.name if like else "cuda"
        self.dtypes = like.dtypes if like else ("float32", "float16", "bfloat16")
        self.mask_dtype = like.mask_dtype if like else "uint8"
        self.keeps_lrn_scale = like.keeps_lrn_scale if like else False
        self.computes_box_loss = like.computes_box_loss if like else True
        self._like = like
        self.convolutions: dict[int, int] = {}
        """Total array bytes of the largest convolution of each step."""
        self.step = SETUP
        """The current step; set by the caller that runs the net."""
        self.memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        """Allocations that are still referenced."""

    def note(self, read: Iterable[Any], written: Iterable[Any]) -> None:
        """Record that the arrays among these values are read, and then written, in the current step."""
        for array in _arrays(read):
            array.memory.read(self.step, array.part)
        for array in _arrays(written):
            array.memory.write(self.step, array.part)

    # -- the device ---------------------------------------------------------------------------------

    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""

    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        raise AssertionError("the meta backend has no data to copy")

    def device_description(self) -> str:
        return "no device"

    # -- memory -------------------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        memory = Memory(tuple(shape), dtype, self.step)
        self.memories.add(memory)
        return MetaArray(memory, memory.shape, memory.whole)

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        return flat.reshape(shape)

    def flat(self, array: Array) -> Array:
        return array.reshape(-1)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        shape = tuple(shape)
        if array.shape == shape or all(map(is_plain, (array.shape, shape))):
            return array.reshape(shape)
        result = self.zeros(shape, array.memory.dtype)
        self.note([array], [result])
        return result

    fill = _primitive("fill", writes=["array"])
    copy = _primitive("copy", ["source"], ["destination"])
    add = _primitive("add", ["source", "destination"], ["destination"])
    from_host = _primitive("from_host", writes=["destination"])

    def to_host(self, array: Array) -> Any:
        self.note([array], [])
        return np.zeros(array.shape, array.dtype)

    # -- computation ------------------------------------------------------------------------------------

    apply = _primitive("apply", ["inputs"], ["outputs"])
    reduce = _primitive("reduce", ["inputs"], sums=["outputs"])
    gemm = _primitive("gemm", ["a", "b"], sums=["out"])
    gemm_and_apply = _primitive("gemm_and_apply", ["a", "b", "channel"], ["out"])

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        g = geometry
        windows = zip(x_shape[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
        y_shape = (x_shape[0], weights_shape[0], *(spatial_output(*window) for window in windows))
        item = np.dtype(element_dtype(dtype)).itemsize
        return MetaConvolution(self, sum(map(math.prod, (x_shape, weights_shape, y_shape))) * item)

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        plan.forward(x, weights, bias, y)
        self.note([residual, y], [y])

    def workspace(self, own: int) -> int:
        return self._like.workspace(own) if self._like else gpu_workspace(own)

    pool_max_forward = _primitive("pool_max_forward", ["x"], ["y", "mask"])
    pool_max_backward = _primitive("pool_max_backward", ["dy", "mask"], ["dx"])
    pool_average_forward = _primitive("pool_average_forward", ["x"], ["y"])
    pool_average_backward = _primitive("pool_average_backward", ["dy"], ["dx"])
    lrn_across_forward = _primitive("lrn_across_forward", ["x"], ["y", "scale"])
    lrn_across_backward = _primitive("lrn_across_backward", ["x", "y", "scale", "dy"], ["dx"])

    batch_norm_measure = _primitive("batch_norm_measure", ["x", *_RUNNING], [*_STATISTICS, *_RUNNING])
    batch_norm_measure_sums = _primitive("batch_norm_measure_sums", ["sums", *_RUNNING], [*_STATISTICS, *_RUNNING])
    batch_norm_finish = _primitive("batch_norm_finish", ["variance", "mean", *_RUNNING], ["inverse", *_RUNNING])
    batch_norm_load = _primitive("batch_norm_load", _RUNNING, _STATISTICS)
    batch_norm_forward = _primitive("batch_norm_forward", ["x", *_NORMAL, "residual"], ["y", "mask"])
    batch_norm_backward_sums = _primitive("batch_norm_backward_sums", ["x", "dys", *_NORMAL, "mask"], ["sums", "total"])
    batch_norm_backward_data = _primitive("batch_norm_backward_data", ["x", "dy", *_NORMAL, "sums"], ["dx"])
    relu_backward = _primitive("relu_backward", ["y", "dy"], ["dx"], sums=["dbias"])
    activation_backward = _primitive("activation_backward", ["y", "dy"], ["dx"], sums=["dbias"])
    dropout = _primitive("dropout", ["source"], ["destination"])
    add_n = _primitive("add_n", ["sources"], ["destination"])

    softmax_forward = _primitive("softmax_forward", ["x"], ["y"])
    softmax_backward = _primitive("softmax_backward", ["y", "dy"], ["dx"])
    softmax_loss_forward = _primitive(
        "softmax_loss_forward", ["x", "labels", "bad_label"], ["probabilities", "totals", "bad_label"]
    )
    softmax_loss_backward = _primitive("softmax_loss_backward", ["probabilities", "labels", "totals"], ["dx"])
    smooth_loss_forward = _primitive("smooth_loss_forward", ["probabilities", "labels", "totals"], ["totals"])
    smooth_loss_backward = _primitive("smooth_loss_backward", ["labels", "dx", "totals"], ["dx"])
    label_ranks = _primitive("label_ranks", ["x", "labels", "bad_label"], ["ranks", "bad_label"])
    gather_rows = _primitive("gather_rows", ["source", "index"], ["destination", "bad"])
    scatter_add_rows = _primitive("scatter_add_rows", ["source", "index", "destination"], ["destination"])
    one_hot = _primitive("one_hot", ["labels"], ["out", "bad"])
    spatial_product = _primitive("spatial_product", [*_MATRIX, "x"], ["y"])
    largest = _primitive("largest", ["x"], ["indices", "values"])
    unpool_forward = _primitive("unpool_forward", ["x", "mask"], ["y", "bad"])
    unpool_backward = _primitive("unpool_backward", ["dy", "mask"], ["dx"])
    pool_stochastic_forward = _primitive("pool_stochastic_forward", ["x", "chance"], ["y", "mask"])
    roi_max_forward = _primitive("roi_max_forward", ["x", "rois"], ["y", "mask", "bad"])
    roi_max_backward = _primitive("roi_max_backward", ["dy", "rois", "mask"], ["dx"])
    roi_average_forward = _primitive("roi_average_forward", ["x", "rois"], ["y", "bad"])
    roi_average_backward = _primitive("roi_average_backward", ["dy", "rois"], ["dx"])
    roi_bilinear_forward = _primitive("roi_bilinear_forward", ["x", "samples", "rows", "columns"], ["y", "bad"])
    roi_bilinear_backward = _primitive("roi_bilinear_backward", ["dy", "samples", "rows", "columns"], ["dx"])
    correlate_forward = _primitive("correlate_forward", ["a", "b"], ["y"])
    correlate_backward = _primitive("correlate_backward", ["dy", "a", "b"], ["da", "db"])
    sample_forward = _primitive("sample_forward", ["x", "positions"], ["y"])
    sample_backward = _primitive("sample_backward", ["x", "positions", "dy"], ["dx", "d_positions"])
    lstm_unit_forward = _primitive("lstm_unit_forward", ["gates", "cell_before", "cont"], ["gates", "cell", "hidden"])
    lstm_unit_backward = _primitive(
        "lstm_unit_backward", ["gates", "cell_before", "cont", "cell", "d_cell", "d_hidden"], ["gates", "d_cell"]
    )
    lstm_step_forward = _primitive(
        "lstm_step_forward", ["gates", "cell_before", "cont", "next_cont"], ["gates", "cell", "hidden", "carried"]
    )
    lstm_step_backward = _primitive(
        "lstm_step_backward",
        ["gates", "cell_before", "cont", "cell", "d_cell", "dy", "next_cont", "d_carried"],
        ["gates", "d_cell", "d_gates", "d_carried"],
    )
    random_uniform = _primitive("random_uniform", writes=["out"])

    def all_finite(self, array: Array) -> bool:
        self.note([array], [])
        return True

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        return MetaBoxLoss(self.note)


class MetaConvolution:
    """A `Convolution` that records its memory accesses.

    Args:
        backend: receives the record.
        own: bytes of its arrays.
    """

    gives_sums = True
    forward_normalised = None
    backward_normalised = None
    """Separate gradients also read the bottom, so a plan made without fusion is valid for both paths."""

    def __init__(self, backend: MetaBackend, own: int) -> None:
        self._backend = backend
        self._own = own

    def _note(self, read: Iterable[Any], written: Iterable[Any]) -> None:
        largest, step = self._backend.convolutions, self._backend.step
        largest[step] = max(largest.get(step, 0), self._own)
        self._backend.note(read, written)

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        self._note([x, weights, bias], [y, sums])

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        self._note([dy, weights], [dx])

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        self._note([x, dy, dweights if accumulate else None], [dweights])


class MetaBoxLoss:
    """A `BoxLoss` that records its memory accesses.

    Args:
        note: called with the arrays that are read and the arrays that are written.
    """

    def __init__(self, note: Callable[[Iterable[Any], Iterable[Any]], None]) -> None:
        self._note = note

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        self._note([locations, scores, priors, objects, problem], [totals, problem])

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        self._note([locations, priors, objects], [gradient])

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        self._note([scores], [gradient])
