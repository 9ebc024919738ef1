"""ContinuationIndicator, which says where sequences begin, and ReverseTime, which reverses each sequence."""

from __future__ import annotations

import math
from math import floor

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, register_layer
from caffepy.layers.loss import IndexCheck


@expression
def reversed_row(time: Each, stream: Each, length: Channel, streams: Scalar) -> Each:
    return (floor(length) - 1 - time if time < floor(length) else time) * streams + stream


@expression
def is_moved(time: Each, length: Channel, copies: Scalar) -> Each:
    return 1.0 if time < floor(length) else copies


@expression
def where_set(x: Each, flag: Channel) -> Each:
    return x if flag > 0 else 0.0


@register_layer("ContinuationIndicator")
class ContinuationIndicatorLayer(Layer):
    """Flags (time_step, batch_size), 0 at the first time step and else 1 (`continuation_indicator_layer.cpp`).

    The layer is crnn.caffe's. With it LSTM and RNN take each pass as `batch_size` sequences of `time_step` time steps.

    Raises:
        ConfigError: a size is missing.
    """

    bottoms = (0, 0)
    has_backward = False
    reads_shapes_only = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.continuation_indicator_param
        if not param.time_step or not param.batch_size:
            raise self.error("continuation_indicator_param needs time_step and batch_size, both at least 1")
        top[0].reshape((param.time_step, param.batch_size))
        self.check_top_memory(top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: `setup` shapes the top."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.fill(top[0].data, 1)
        self.backend.fill(top[0].data[:1], 0)


@register_layer("ReverseTime")
class ReverseTimeLayer(Layer):
    """The first `length` time steps of each sequence in reverse order (caffe_ocr's `reverse_time_layer.cpp`).

    x and y are (T, N, …), and the second bottom has the N lengths. Time steps behind a sequence are copied with
    `copy_remaining`. Without it caffe_ocr leaves them as they are in memory; here they are 0, as is their gradient.

    Raises:
        ShapeError: the first bottom does not have T and N, or there are not N lengths.
        DataError: a length exceeds T.
    """

    bottoms = (2, 2)
    no_gradient_bottoms = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check = IndexCheck(self, f"a length of '{bottom[1].title}' exceeds the time steps, at row {{}}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2 or bottom[1].shape != shape[1:2]:
            raise self.shape_error("needs (time steps, sequences, …) and a length for each sequence", *bottom)
        top[0].reshape(shape)
        if shape == self._shape:
            return
        self._shape, steps = shape, shape[:2]
        rows = (math.prod(steps), math.prod(shape[2:]))
        self._x, self._y = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._time, self._stream, self._rows, self._moved = (self.backend.zeros(steps) for _ in range(4))
        for array, place in zip((self._time, self._stream), np.indices(steps, np.float32), strict=True):
            self.backend.from_host(place, array)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        lengths, streams = bottom[1].data, float(bottom[1].count)
        self.backend.apply(reversed_row, (self._time, self._stream, lengths, streams), (self._rows,))
        copies = float(self.param.reverse_time_param.copy_remaining)
        self.backend.apply(is_moved, (self._time, lengths, copies), (self._moved,))
        self._move(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """The gradient moves as the values do: a time step's place is where its own place came from."""
        if propagate_down[0]:
            self._move(top[0].diff, bottom[0].diff)

    def _move(self, source: Array, destination: Array) -> None:
        backend, moved = self.backend, self._y.target(destination)
        rows, flags = (backend.flat(array) for array in (self._rows, self._moved))
        backend.gather_rows(self._x.load(source), rows, moved, self._check.bad_index)
        backend.apply(where_set, (moved, flags), (moved,), axis=0)
        self._y.store(destination)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()
