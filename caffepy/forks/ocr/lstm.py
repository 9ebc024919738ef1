"""Lstm of CTPN: an LSTM whose gates' gradients are cut."""

from __future__ import annotations

import math

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.backend.formulas import identity, product_with_channel, total_with_channel
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayerContext, LayoutAdapter, register_layer

STATES = ("hidden", "cell")


@expression
def as_flag(x: Each) -> Each:
    return 0.0 if x == 0 else 1.0


@expression
def cut(x: Each, limit: Scalar) -> Each:
    return limit if x > limit else (-limit if x < -limit else x)


@register_layer("Lstm")
class LstmLayer(Layer):
    """The hidden states of an LSTM (CTPN's `lstm_layer.cpp`; Hochreiter and Schmidhuber 1997, with forget gates).

    (i, f, o, g) = W_i x_t + b + c_t W_h h_t-1, each of D numbers; s_t = c_t sigmoid(f) s_t-1 + sigmoid(i) tanh(g);
    h_t = sigmoid(o) tanh(s_t). Without a second bottom, c_t is 0 at the first time step and else 1, so that each pass
    begins a sequence. The second bottom has T N numbers: c_t is 0 where one is 0, and else 1; then h and s continue
    those of the last pass. The backward pass cuts the gradient by (i, f, o, g) to at most `clipping_threshold` in
    absolute value, if that is not 0.

    Shapes: x (T, N, …), y (T, N, D); or x (T N, K), y (T N, D) with N = `batch_size`. Parameters: W_i (4 D, K),
    W_h (4 D, D), b (4 D,). LSTM is another type, with Caffe's settings and order of parameters.

    Raises:
        ConfigError: num_output is missing.
        ShapeError: the bottoms' shapes do not fit each other, batch_size or the parameters.
    """

    bottoms = (1, 2)
    learns = True
    no_gradient_bottoms = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.lstm_param
        if param.num_output < 1:
            raise self.error("lstm_param needs num_output")
        if not param.clipping_threshold >= 0:
            raise self.error(f"clipping_threshold is {param.clipping_threshold:g}; it must not be negative")
        self._size = param.num_output
        self._streams = 0
        self._stored: list[Array] = []
        self.add_parameter((4 * self._size, self._sizes(bottom)[2]), param.weight_filler)
        self.add_parameter((4 * self._size, self._size), param.weight_filler)
        self.add_parameter((4 * self._size,), param.bias_filler)

    def _sizes(self, bottom: Blobs) -> tuple[int, int, int]:
        """Return T, N and K."""
        shape, streams = bottom[0].shape, self.param.lstm_param.batch_size
        if len(shape) > 2:
            sizes = (shape[0], shape[1], math.prod(shape[2:]))
        elif len(shape) == 2 and streams and shape[0] % streams == 0:
            sizes = (shape[0] // streams, streams, shape[1])
        else:
            problem = f"needs (time steps, streams, numbers), or (time steps * streams, numbers) of {streams} streams"
            raise self.shape_error(problem, bottom[0])
        if min(sizes) < 1:
            raise self.shape_error("no axis of the bottom may be empty", bottom[0])
        return sizes

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._steps, streams, inputs = self._sizes(bottom)
        if inputs != self.blobs[0].shape[1]:
            raise self.shape_error(
                f"the weights need {self.blobs[0].shape[1]} numbers for each stream", bottom[0], self.blobs[0]
            )
        if len(bottom) > 1 and math.prod(bottom[1].shape) != self._steps * streams:
            raise self.shape_error("the second bottom needs a number for each time step and stream", *bottom)
        shape = bottom[0].shape
        top[0].reshape((*(shape[:2] if len(shape) > 2 else shape[:1]), self._size))
        if shape != self._shape:
            self._shape = shape
            rows = (self._steps * streams, inputs)
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        if len(bottom) > 1:
            self._flags = LayoutAdapter(self.backend, bottom[1].shape, (self._steps, streams))
            if streams != self._streams:
                self._stored = [self.backend.zeros((streams, self._size)) for _ in STATES]
        self._streams = streams

    def state(self) -> list[Array]:
        return self._stored

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        return len(param.bottom) > 1

    def _buffer(self, name: str, *sizes: int) -> Array:
        return self.scratch(name, (*sizes[:-1], self._streams, sizes[-1])).array

    def _rows(self, array: Array) -> Array:
        return array.reshape(-1, array.shape[-1])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, steps, size = self.backend, self._steps, self._size
        gates, cells = self._buffer("gates", steps, 4 * size), self._buffer("cells", steps, size)
        carried, cont = self._buffer("carried", steps, size), self.scratch("cont", (steps, self._streams)).array
        backend.gemm(self._x.load(bottom[0].data), self.blobs[0].data, self._rows(gates), transpose_b=True)
        backend.apply(total_with_channel, (self._rows(gates), self.blobs[2].data), (self._rows(gates),))
        first = [self._buffer(name, size) for name in STATES]
        if len(bottom) > 1:
            backend.apply(as_flag, (self._flags.load(bottom[1].data),), (cont,))
            for stored, before in zip(self._stored, first, strict=True):
                backend.copy(stored, before)
        else:
            backend.fill(cont, 1.0)
            backend.fill(cont[0], 0.0)
            for before in first:
                backend.fill(before, 0.0)
        hidden, cell = top[0].data.reshape(steps, self._streams, size), first[1]
        backend.apply(product_with_channel, (first[0], cont[0]), (carried[0],), axis=0)
        for t in range(steps):
            backend.gemm(carried[t], self.blobs[1].data, gates[t], transpose_b=True, accumulate=True)
            following = (cont[t + 1], carried[t + 1]) if t + 1 < steps else ()
            backend.lstm_step_forward(gates[t], cell, cont[t], cells[t], hidden[t], *following)
            cell = cells[t]
        for last, stored in zip((hidden[steps - 1], cell), self._stored, strict=False):
            backend.copy(last, stored)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, steps, size = self.backend, self._steps, self._size
        gates, cells = self._buffer("gates", steps, 4 * size), self._buffer("cells", steps, size)
        carried, cont = self._buffer("carried", steps, size), self.scratch("cont", (steps, self._streams)).array
        dy = top[0].diff.reshape(steps, self._streams, size)
        d_carried, d_cell = self._buffer("hidden gradient", size), self._buffer("cell gradient", size)
        limit = self.param.lstm_param.clipping_threshold
        backend.fill(d_cell, 0.0)
        for t in reversed(range(steps)):
            before = cells[t - 1] if t else self._buffer("cell", size)
            following = (cont[t + 1], d_carried) if t + 1 < steps else ()
            step = gates[t]
            backend.lstm_step_backward(step, before, cont[t], cells[t], d_cell, dy[t], step, *following)
            if limit:
                backend.apply(cut, (step, limit), (step,))
            if t:
                backend.gemm(step, self.blobs[1].data, d_carried)
        rows = self._rows(gates)
        for index, source in ((0, self._x.target(bottom[0].data)), (1, self._rows(carried))):
            if self.propagate_to_params[index]:
                backend.gemm(rows, source, self.blobs[index].diff, transpose_a=True, accumulate=self.accumulate(index))
        if self.propagate_to_params[2]:
            backend.reduce(identity, (rows,), (self.blobs[2].diff,), accumulate=self.accumulate(2))
        if propagate_down[0]:
            backend.gemm(rows, self.blobs[0].data, self._dx.target(bottom[0].diff))
            self._dx.store(bottom[0].diff)
