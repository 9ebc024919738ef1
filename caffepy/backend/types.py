"""Arguments and results of primitives: arrays and their memory layout, geometry, streams, events and input rings.

The size functions give what a net must know before it allocates arrays: sizes of outputs, masks and GPU workspaces.

A backend returns graphs, events, timers, asynchronous copies and planned convolutions. Each backend has its own classes
for them. Those of the CPU backend and the meta backend, whose primitives finish before they return, stand at the end;
the GPU's are in `cuda/graph.py`. Convolutions are beside their kernels.

Images, (N, C, H, W) or (N, C, D, H, W), are channels last in memory: (N, H, W, C) or (N, D, H, W, C). Arrays with any
other number of axes are C-contiguous.

Input travels to a device through a ring of slots, and a primitive converts batches to blobs. This module defines the
byte layout of an image batch, the ring's interface, and its reference implementation in host memory. Backends without
device memory use the reference implementation; tests compare the others with it.

`address` is that of an array of any device. `host_address` is quick, for compiled kernels and for system calls.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

Array = Any
"""A numpy.ndarray or cupy.ndarray."""

DTYPES = ("float32", "float16", "bfloat16")
"""dtypes of a blob."""

Counter = Any
"""Position in a random sequence: the pair (pass number, global number of the first sample), or a uint64 array of both
in device memory, which a captured graph reads at each launch."""

PRODUCT_WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace, as NVIDIA recommends for Hopper and newer."""


def element_dtype(dtype: str) -> str:
    """Return the NumPy dtype that stores a blob dtype: uint16 for bfloat16."""
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Geometry:
    """Window geometry over the spatial axes of a blob, one entry per spatial axis.

    Args:
        kernel: window size.
        stride: step.
        pad: zeros before and after.
        dilation: distance between window elements.
        group: number of groups of input and output channels (convolution only).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    group: int = 1


@dataclass(frozen=True)
class LrnWindow:
    """Parameters of local response normalisation across channels; formula: `Backend.lrn_across_forward`.

    Args:
        size: channels of a window, odd.
        alpha: factor of the window's sum of squares, divided by `size`.
        beta: exponent.
        k: additive constant.
    """

    size: int
    alpha: float
    beta: float
    k: float = 1.0


@dataclass(frozen=True)
class RandomStream:
    """Key of a counter-based random sequence (Philox 4x32-10, Salmon et al., SC11).

    The number for element i (logical order, within its sample) of global sample s is a function of
    (seed, stream, pass_number, s, i) only, independent of how samples are distributed over devices.

    Args:
        seed: the solver's random_seed, 64 bits.
        stream: identifies the user of random numbers within a net, e.g. a hash of the layer's name; 32 bits.
    """

    seed: int
    stream: int


@dataclass
class BatchNormState:
    """Statistics and parameters of one batch normalisation: float32 arrays of shape (C,), except the count.

    Args:
        mean: of the current batch, or the stored mean.
        inverse: 1 / sqrt(variance + epsilon) of the same.
        scale: factor after normalisation.
        bias: term added after the factor.
        sum_mean: running sum of means (Caffe's blob 0).
        sum_variance: running sum of variances (blob 1).
        count: shape (1,), total weight of the running sums (blob 2).
        epsilon: added to the variance.
        fraction: decay of the running sums per batch.
    """

    mean: Array
    inverse: Array
    scale: Array
    bias: Array
    sum_mean: Array
    sum_variance: Array
    count: Array
    epsilon: float
    fraction: float


@dataclass(frozen=True)
class NormalisedBottom:
    """A convolution's bottom, expressed by the batch normalisation that produces it.

    Args:
        x: the normalisation's input, of the bottom's shape.
        n: statistics and parameters of the normalisation.
        relu: whether a ReLU follows the normalisation.
        sums: receives the gradients of scale and bias in a backward pass, float32 (C,) each:
            `Backend.batch_norm_backward_sums`.
    """

    x: Array
    n: BatchNormState
    relu: bool
    sums: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in compressed sparse row (CSR) format, in device memory.

    Args:
        begins: row offsets, int32 (rows + 1,).
        columns: column indices, int32 (entries,), each within [0, columns).
        weights: values, float32 (entries,).
        shape: (rows, columns).
    """

    begins: Array
    columns: Array
    weights: Array
    shape: tuple[int, int]


@dataclass(frozen=True)
class CorrelationWindow:
    """Patches and displacements of the correlation of two images, in pixels; pairs are (rows, columns).

    Args:
        kernel: height and width of a patch.
        stride: distance of the patches in the first image.
        origin: upper left corner of the first patch; negative if it lies in the padding.
        first: the first displacement.
        count: number of displacements.
        step: distance of the displacements.
        subtract: take absolute differences, else products.
    """

    kernel: int
    stride: int
    origin: tuple[int, int]
    first: tuple[int, int]
    count: tuple[int, int]
    step: int
    subtract: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """All settings in the order of the kernels' arguments."""
        return (self.kernel, self.stride, *self.origin, *self.first, *self.count, self.step, int(self.subtract))


class Border(IntEnum):
    """What an image has outside its pixels when it is sampled at fractional positions."""

    ZERO = 0
    """Pixels outside are 0."""
    INSIDE = 1
    """Positions outside [0, size - 1] have a fill value. The derivative at a pixel is the mean of both sides'."""
    REPEAT = 2
    """Positions outside [0, size) have a fill value. The last pixel is repeated once."""


@dataclass(frozen=True)
class BoxLossSettings:
    """Options of SSD's loss: fields of MultiBoxLossParameter; see `MultiBoxLossLayer`.

    Args:
        classes: number of classes, with the background.
        background: label of the background.
        code: value of CodeType, the encoding of predicted boxes.
        threshold: minimum overlap of a prior with its object.
        per_prediction: match every prior above the threshold, not only the best of each object.
        ignore_crossing: ignore priors that cross the image's border.
        difficult: include objects marked as difficult.
        agnostic: give all objects the class after the background's.
        mines: keep only the `ratio` unmatched priors per match that have the largest losses.
        ratio: see `mines`.
        most_overlap: do not mine priors with at least this overlap with an object.
        logistic: use sigmoid cross entropy for the scores, else softmax cross entropy.
        squared: use d^2 / 2 for the boxes, else the smooth L1 loss.
        variance_in_target: do not divide predictions by the priors' variances.
        inside: ignore prior coordinates outside the image.
        weight: weight of the boxes' loss.
        boxes_count: whether the loss includes the boxes' loss.
        scores_count: whether the loss includes the scores' loss.
    """

    classes: int
    background: int
    code: int
    threshold: float
    per_prediction: bool
    ignore_crossing: bool
    difficult: bool
    agnostic: bool
    mines: bool
    ratio: float
    most_overlap: float
    logistic: bool
    squared: bool
    variance_in_target: bool
    inside: bool
    weight: float
    boxes_count: bool
    scores_count: bool


def convolution_workspace(own: int) -> int:
    """Return the workspace bytes that a GPU convolution may use if its arrays have `own` bytes."""
    return min(2**30, 2**25 + 4 * own)


def gpu_workspace(own: int) -> int:
    """Return `Backend.workspace` of a GPU: the workspaces of its largest convolution and of cuBLAS."""
    return PRODUCT_WORKSPACE + (convolution_workspace(own) if own else 0)


def mask_bytes(size: int) -> int:
    """Return the bytes of a bit mask of `size` elements, rounded up to 16 for wide stores."""
    return -(-size // 128) * 16


def spatial_output(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Return convolution's output size: floor((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1."""
    return (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1


# -- objects that a backend returns --------------------------------------------------------------------


class Graph(Protocol):
    """Work captured by `Backend.capture`, launched any number of times without Python.

    `CudaGraph` wraps a CUDA graph, `KernelGraph` is a list of CPU kernel calls.
    """

    def launch(self) -> None:
        """Do the work with the arrays' current contents; with a stream, queue it there."""


class Event(Protocol):
    """A point on the backend's stream."""

    def wait(self) -> None:
        """Wait for the work before the event."""


class TimedEvent(Protocol):
    """An event with timing enabled."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds since an earlier event of the same backend; waits until this event is reached."""


class DeviceTimer(Protocol):
    """Stopwatches on the device. `start` and `stop` may be captured.

    Both are queued on the current stream, which need not be the backend's.
    """

    def start(self, index: int) -> None:
        """Start a stopwatch."""

    def stop(self, index: int) -> None:
        """Stop the stopwatch and add the time since `start` to its total."""

    def reset(self) -> None:
        """Set the totals to 0."""

    def totals(self) -> list[float]:
        """Return each stopwatch's total seconds; waits for the device."""

    def times(self) -> list[float]:
        """Return each stopwatch's last start, in seconds of the device's clock; waits for the device."""


class AsyncCopy(Protocol):
    """An asynchronous copy of an array to the host."""

    def get(self) -> Any:
        """Return the NumPy array; waits for the copy."""


class DeviceScalars(Protocol):
    """Numbers that change every iteration, in memory that captured work reads."""

    @property
    def array(self) -> Array:
        """All numbers, float32."""

    @property
    def values(self) -> Sequence[Array | float]:
        """Each number as a Scalar argument of a formula. Read it again each time work is queued."""

    @property
    def counters(self) -> Sequence[Counter | None]:
        """Each counter in the form that `dropout` takes; None if host numbers are used instead."""

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Set the numbers for the work that is queued next."""


class NormalisedForward(Protocol):
    """A convolution fused with the batch normalisation before it."""

    def __call__(self, bottom: NormalisedBottom, weights: Array, y: Array, sums: Array | None) -> None:
        """Compute y and sums as `Convolution.forward` of `bottom`, which is not rounded to its dtype."""


class NormalisedGradients(Protocol):
    """Both gradients of a convolution fused with the batch normalisation before it."""

    def __call__(
        self, bottom: NormalisedBottom, dy: Array, weights: Array, dx: Array, dweights: Array, accumulate: bool
    ) -> None:
        """Compute dx and dweights (+)= for input `bottom`, and the sums over dx for `bottom.sums`."""


class Convolution(Protocol):
    """A convolution of fixed shapes, planned once (algorithm, workspace) and run many times.

    Shapes for two spatial axes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w),
    bias (num_output,), y (N, num_output, H', W'). x, y, dx, dy and the weights given to `forward` and `backward_data`
    have the planned dtype; bias and dweights are float32.
    """

    @property
    def gives_sums(self) -> bool:
        """Whether `forward` can also compute the channel sums of y."""

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """y = weights * x (+ bias), then ReLU if `relu`. Computes cross-correlation, as Caffe does.

        `sums`, float32 of shape (2, num_output), receives the sum of y and of y^2 per channel. It requires `gives_sums`
        and excludes bias and relu.
        """

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights. Deconvolution's forward pass calls it too."""

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy, summed over the batch."""

    @property
    def forward_normalised(self) -> NormalisedForward | None:
        """The forward pass fused with the preceding normalisation, or None if separate kernels are faster."""

    @property
    def backward_normalised(self) -> NormalisedGradients | None:
        """Both gradients in one pass, or None if separate passes are faster."""


class BoxLoss(Protocol):
    """SSD's loss for batches of one shape, computed on the device; the layer is `MultiBoxLossLayer`.

    Locations (N, 4 P), scores (N, P classes), priors (1, 2, 4 P) and objects (1, 1, G, 8) are float32.
    """

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        """totals = the sum of all losses and the number of matches, float32 (2,).

        problem: float32 (10,). Its first element, if 0, receives an error code: 1 if an object's image or label is not
        a number, 2 if a label is out of range, 3 if a prior has no extent or variance. The second element receives the
        row. The others receive the row's values: the first four of an object, or box and variances of a prior.
        """

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the locations, which must be unchanged."""

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the scores."""


# -- memory layout -------------------------------------------------------------------------------------

CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""Memory order of an image's axes, by number of axes."""

CHANNELS_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""The inverse permutation: from memory order to N, C, (D,) H, W."""

ARENA_ALIGNMENT = 512
"""Alignment in bytes of arrays in an arena, as of CUDA's allocations."""

SLOT_ALIGNMENT = 256
"""Alignment in bytes of an input ring's slots and their parts."""

WIDE_LOAD = 16
"""Bytes of a GPU thread's widest load; the address must be a multiple of it."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def aligned_bytes(size: int) -> int:
    """Return `size` rounded up to ARENA_ALIGNMENT."""
    return round_up(size, ARENA_ALIGNMENT)


def address(array: Array) -> int:
    """Return the device address of an array's first element."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def memory_axes(ndim: int) -> tuple[int, ...]:
    """Return the logical axes in memory order, outermost first."""
    return CHANNELS_LAST.get(ndim) or tuple(range(ndim))


def memory_order(array: Array) -> Array:
    """Return a view of the array with its axes in memory order."""
    return array.transpose(CHANNELS_LAST[array.ndim]) if array.ndim in CHANNELS_LAST else array


def view(flat: Array, shape: tuple[int, ...]) -> Array:
    """Return a 1-D array in memory order as a view of a logical shape."""
    if len(shape) not in CHANNELS_LAST:
        return flat.reshape(shape)
    return flat.reshape([shape[axis] for axis in CHANNELS_LAST[len(shape)]]).transpose(CHANNELS_FIRST[len(shape)])


def is_plain(shape: tuple[int, ...]) -> bool:
    """Return whether memory order equals logical (C) order for a shape."""
    return len(shape) not in CHANNELS_LAST or shape[1] == 1 or math.prod(shape[2:]) == 1


def channels_and_pixels(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (C, pixels) of one sample of an image; in other arrays each element is a channel."""
    return (shape[1], math.prod(shape[2:])) if len(shape) in CHANNELS_LAST else (math.prod(shape[1:]), 1)


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether an array with these strides (bytes) is contiguous in memory order; a slice is not."""
    step = itemsize
    for axis in reversed(memory_axes(len(shape))):
        if shape[axis] != 1 and strides[axis] != step and 0 not in shape:
            return False
        step *= shape[axis]
    return True


# -- input rings ---------------------------------------------------------------------------------------


def aligned_size(size: int) -> int:
    """The next multiple of SLOT_ALIGNMENT."""
    return round_up(size, SLOT_ALIGNMENT)


@dataclass(frozen=True)
class ImageSlot:
    """Byte layout of an image batch in a slot.

    Labels, float32 (N,), from byte 0; then crops, int32 (N, 3): mirror flag, row and column of the crop in the full
    image; then pixels, uint8 (N, C, H, W).

    Args:
        count: N.
        channels: C.
        height: H of the crop.
        width: W of the crop.
    """

    count: int
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self.count, self.channels, self.height, self.width

    @property
    def crops_at(self) -> int:
        """Byte offset of the crops."""
        return aligned_size(4 * self.count)

    @property
    def pixels_at(self) -> int:
        """Byte offset of the pixels."""
        return self.crops_at + aligned_size(12 * self.count)

    @property
    def size(self) -> int:
        """Bytes of the slot."""
        return self.pixels_at + aligned_size(math.prod(self.shape))

    def parts(self, memory: Any) -> tuple[Any, Any, Any]:
        """Return labels, crops and pixels as views of a slot's bytes (a NumPy array)."""
        n, size = self.count, math.prod(self.shape)
        return (
            memory[: 4 * n].view("float32"),
            memory[self.crops_at : self.crops_at + 12 * n].view("int32").reshape(n, 3),
            memory[self.pixels_at : self.pixels_at + size].reshape(self.shape),
        )


@dataclass(frozen=True)
class ByteImages:
    """Preprocessing of images that arrive as bytes.

    Args:
        slot: byte layout of a batch.
        mean: subtracted from the pixels; float32 (NumPy), (C, H, W) of full images or (C, 1, 1).
        scale: factor after the subtraction.
    """

    slot: ImageSlot
    mean: Any
    scale: float


class InputRing(ABC):
    """Input slots on the device, used in turn: pass p reads slot p % slots.

    Consecutive passes are transferred together in blocks; the first block begins at pass 0. Only the solver's thread
    calls the methods.

    Args:
        slot_size: bytes of a slot, a multiple of SLOT_ALIGNMENT.
        block: maximum passes per transfer, a power of two.
        blocks: blocks in the ring, a power of two.
    """

    def __init__(self, slot_size: int, block: int, blocks: int) -> None:
        assert slot_size % SLOT_ALIGNMENT == 0, slot_size
        assert block & (block - 1) == 0, block
        assert blocks & (blocks - 1) == 0, blocks
        self.slot_size = slot_size
        self.block = block
        self.blocks = blocks
        self.slots = block * blocks

    @abstractmethod
    def ready(self) -> bool:
        """Return whether another `put` fits in the ring now; does not wait for the device."""

    @abstractmethod
    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        """Copy the data of passes of one block to their slots. Work queued afterwards sees the data.

        Args:
            number: the first pass.
            passes: number of passes.
            parts: pairs of a byte offset in the first slot and the bytes to copy there (NumPy, uint8, 1-D). The bytes
                of later passes follow without a gap.
            done: called when the source bytes may be overwritten.
        """

    @abstractmethod
    def consumed(self, number: int) -> None:
        """Mark pass `number` as consumed: all work that reads its data is queued."""

    @abstractmethod
    def restart(self) -> None:
        """Discard the passes that are not consumed; the next `put` may start at any pass."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Free the memory once all transfers have finished. Idempotent."""


class HostRing(InputRing):
    """A ring whose slots are the source buffers themselves, without a copy."""

    def __init__(self, slot_size: int, block: int, blocks: int) -> None:
        super().__init__(slot_size, block, blocks)
        self._held: deque[tuple[int, int, Sequence[tuple[int, Any]], Callable[[], None]]] = deque()

    def ready(self) -> bool:
        return len(self._held) < self.blocks

    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        self._held.append((number, number + passes, parts, done))

    def consumed(self, number: int) -> None:
        while self._held and number + 1 >= self._held[0][1]:
            self._held.popleft()[3]()

    def restart(self) -> None:
        while self._held:
            self._held.popleft()[3]()

    def close(self, timeout: float = 10.0) -> None:
        self.restart()

    def bytes_of(self, number: int, offset: int, size: int) -> Any:
        """Return `size` bytes at `offset` of the slot of pass `number`."""
        for first, stop, parts, _ in self._held:
            if first <= number < stop:
                position = (number - first) * self.slot_size + offset
                begin, memory = next(part for part in reversed(parts) if part[0] <= position)
                return memory[position - begin : position - begin + size]
        raise AssertionError(f"pass {number} was not put")


# -- objects of backends whose primitives finish before they return ------------------------------------


class HostScalars:
    """A `DeviceScalars` in host memory.

    Args:
        values: number of values.
        counters: number of counters.
    """

    def __init__(self, values: int, counters: int) -> None:
        self.array = np.zeros(values, np.float32)
        self.values: Sequence[Array | float] = [0.0] * values
        self.counters: Sequence[Counter | None] = [None] * counters

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        self.array[:] = values
        self.values = list(values)


class HostAsyncCopy:
    """An `AsyncCopy` that is complete when created."""

    def __init__(self, array: Array) -> None:
        self._copy = np.array(array)

    def get(self) -> Array:
        return self._copy


class HostTimedEvent:
    """A `TimedEvent` of finished work."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: HostTimedEvent) -> float:
        return self._time - earlier._time


class HostTimer:
    """A `DeviceTimer` on the host's clock.

    Args:
        count: number of stopwatches.
        now: the clock, in seconds.
    """

    def __init__(self, count: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = [now()] * count
        self._totals = [0.0] * count

    def start(self, index: int) -> None:
        self._started[index] = self._now()

    def stop(self, index: int) -> None:
        self._totals[index] += self._now() - self._started[index]

    def reset(self) -> None:
        self._totals = [0.0] * len(self._totals)

    def totals(self) -> list[float]:
        return list(self._totals)

    def times(self) -> list[float]:
        return list(self._started)


class Done:
    """An `Event` of finished work."""

    def wait(self) -> None:
        """Return at once."""


class Synchronous:
    """Part of a `Backend` whose primitives finish before they return and whose clock is the host's."""

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        return HostScalars(values, counters)

    def record_event(self) -> Event:
        return Done()

    def record_timed_event(self) -> TimedEvent:
        return HostTimedEvent()

    def device_timer(self, count: int) -> DeviceTimer:
        return HostTimer(count)


_HEADER = object.__basicsize__


def _field_address(array: Any) -> int:
    """Read the data pointer, the first field of NumPy's array object."""
    return ctypes.c_ssize_t.from_address(id(array) + _HEADER).value


def _documented_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _choose_address() -> Callable[[Any], int]:
    # The documented way takes 2 us, as long as a small kernel, and a kernel has up to ten arrays.
    probes = [np.zeros(3), np.zeros((4, 5))[1:, 2:], np.zeros(())]
    try:
        same = all(_field_address(probe) == _documented_address(probe) for probe in probes)
    except ValueError:
        same = False
    return _field_address if same and sys.implementation.name == "cpython" else _documented_address


host_address: Callable[[Any], int] = _choose_address()
"""Return the address of an array's first element."""
