"""LSTM, LSTMUnit and RNN, and their common base: input projection, state between passes, bottoms and tops.

Caffe unrolls such a layer into an inner net of small layers with shared weights (`recurrent_layer.cpp`). Here one
matrix product computes the input projection of all time steps, and a loop computes the recurrence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from caffepy.backend import Array
from caffepy.backend.formulas import (
    hyperbolic_tangent,
    identity,
    product_with_channel,
    tanh_gradient,
    total_with_channel,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayerContext, LayoutAdapter, register_layer

log = logging.getLogger(__name__)

NamedArrays = Iterator[tuple[str, str, Array]]
"""Names of layer and blob in Caffe's unrolled net, and the values."""


class RecurrentLayer(Layer):
    """A layer over T time steps of N streams with a hidden state of D = num_output numbers.

    Bottoms: x (T, N, ...); cont (T, N), 0 where a sequence begins, else 1; optionally x_static (N, ...), which is an
    input of every time step; with `expose_hidden` the states before the first time step, each (1, N, D).
    Tops: the output (T, N, D); with `expose_hidden` the states after the last time step, each (1, N, D).

    Parameters: input weights (S, K), bias (S,), with x_static its weights (S, K_static), then the parameters of the
    subclass. S = `gate_count` * D is the number of pre-activations of a time step.

    Without `expose_hidden` the next pass starts with the states of the last one, initially 0, masked by `cont`. As in
    Caffe, no gradient passes through exposed states or from one pass to another; the state bottoms get a gradient of 0.

    Raises:
        ConfigError: num_output is missing, or the number of bottoms or tops does not match `expose_hidden`.
        ShapeError: time steps, streams, states or weights do not match.
    """

    bottoms = (2, 5)
    learns = True
    tops = (1, 3)
    no_gradient_bottoms = frozenset({1})
    no_gradient_tops = frozenset({1, 2})
    state_count: ClassVar[int]
    """Number of states that a time step hands to the next: 1 for RNN (h), 2 for LSTM (h, c)."""
    gate_count: ClassVar[int]
    """Pre-activations per hidden unit, S / D."""

    _x_shape: tuple[int, ...] | None = None
    _static_shape: tuple[int, ...] | None = None

    # -- overridden by layer types -------------------------------------------------------------------

    def add_recurrent_parameters(self, size: int) -> None:
        """Make the parameters that follow the input's parameters."""
        raise NotImplementedError

    def forward_steps(self, cont: Array, first: Sequence[Array], top: Array) -> Sequence[Array]:
        """Run all time steps from the states `first`, (N, D) each, and return the states after the last step.

        `self.preactivations()` holds the input projection.
        """
        raise NotImplementedError

    def backward_steps(self, cont: Array, first: Sequence[Array], top: Blob) -> None:
        """Replace `self.preactivations()` by their gradients, and compute those of the subclass's parameters."""
        raise NotImplementedError

    def inner_blobs(self) -> NamedArrays:
        """Yield the values that `debug_info` logs after a forward pass."""
        raise NotImplementedError

    # -- shapes --------------------------------------------------------------------------------------

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.recurrent_param
        if param.num_output < 1:
            raise self.error("recurrent_param needs num_output")
        self._size = param.num_output
        exposed = self.state_count if param.expose_hidden else 0
        if len(top) != 1 + exposed:
            raise self.error(f"takes {1 + exposed} top blobs, has {len(top)} (expose_hidden: {param.expose_hidden})")
        if len(bottom) - 2 - exposed not in (0, 1):
            raise self.error(
                f"takes {2 + exposed} bottom blobs, and one more with a static input, has {len(bottom)} "
                f"(expose_hidden: {param.expose_hidden})"
            )
        self._static = bottom[2] if len(bottom) > 2 + exposed else None
        self._check_shapes(bottom)
        rows = self.gate_count * self._size
        self.add_parameter((rows, math.prod(bottom[0].shape[2:])), param.weight_filler)
        self.add_parameter((rows,), param.bias_filler)
        if self._static is not None:
            self.add_parameter((rows, math.prod(self._static.shape[1:])), param.weight_filler)
        self.add_recurrent_parameters(self._size)

    def _hidden_bottoms(self, bottom: Blobs) -> Blobs:
        exposed = self.state_count if self.param.recurrent_param.expose_hidden else 0
        return bottom[len(bottom) - exposed :]

    def _check_shapes(self, bottom: Blobs) -> None:
        x, cont = bottom[:2]
        if len(x.shape) < 2 or x.shape[0] < 1:
            raise self.shape_error("the first bottom needs at least two axes, (time steps, streams, ...)", x)
        if cont.shape != x.shape[:2]:
            raise self.shape_error("the second bottom must have the first one's time steps and streams", x, cont)
        if self._static is not None and self._static.shape[:1] != x.shape[1:2]:
            raise self.shape_error("the static input must have as many streams as the first bottom", x, self._static)
        for blob in self._hidden_bottoms(bottom):
            if blob.shape != (1, x.shape[1], self._size):
                raise self.shape_error(f"a state must have the shape 1 {x.shape[1]} {self._size}", x, blob)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._static is not None:
            self._static = bottom[2]
        self._check_shapes(bottom)
        self._check_width(bottom[0], self.blobs[0])
        steps, streams = bottom[0].shape[:2]
        top[0].reshape((steps, streams, self._size))
        for blob in top[1:]:
            blob.reshape((1, streams, self._size))
        if self._x_shape != bottom[0].shape:
            self._reshape_input(bottom[0].shape)
        if self._static is not None and self._static_shape != self._static.shape:
            self._check_width(self._static, self.blobs[2])
            self._static_shape = shape = self._static.shape
            matrix = (shape[0], math.prod(shape[1:]))
            self._static_x, self._static_dx = (LayoutAdapter(self.backend, shape, matrix) for _ in range(2))

    def _check_width(self, blob: Blob, weights: Blob) -> None:
        leading = 2 if weights is self.blobs[0] else 1
        if math.prod(blob.shape[leading:]) != weights.shape[1]:
            raise self.shape_error(f"the weights need {weights.shape[1]} numbers for each stream", blob, weights)

    def _reshape_input(self, shape: tuple[int, ...]) -> None:
        matrix = (shape[0] * shape[1], math.prod(shape[2:]))
        self._x, self._dx = (LayoutAdapter(self.backend, shape, matrix) for _ in range(2))
        if self._x_shape is None or self._x_shape[1] != shape[1]:
            self._stored_states = [self.backend.zeros((shape[1], self._size)) for _ in range(self.state_count)]
        self._x_shape = shape

    def state(self) -> Sequence[Array]:
        return () if self.param.recurrent_param.expose_hidden else self._stored_states

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        return not param.recurrent_param.expose_hidden

    # -- used by subclasses --------------------------------------------------------------------------

    def steps_buffer(self, name: str, width: int = 1) -> Array:
        """Return a scratch buffer (T, N, width * D)."""
        assert self._x_shape is not None
        return self.scratch(name, (*self._x_shape[:2], width * self._size)).array

    def step_buffer(self, name: str) -> Array:
        """Return a scratch buffer (N, D)."""
        assert self._x_shape is not None
        return self.scratch(name, (self._x_shape[1], self._size)).array

    def preactivations(self) -> Array:
        """Return the buffer (T, N, S) of pre-activations, which a subclass replaces by activations and gradients."""
        return self.steps_buffer("sums", self.gate_count)

    def mask_state(self, state: Array, cont: Array, out: Array) -> None:
        """out = cont * state: the state (N, D), 0 for streams where a sequence begins."""
        self.backend.apply(product_with_channel, (state, cont), (out,), axis=0)

    def as_rows(self, array: Array) -> Array:
        """Return a view of (T, N, W) as (T * N, W)."""
        return array.reshape(array.shape[0] * array.shape[1], array.shape[2])

    def compute_weight_gradient(self, index: int, dy: Array, x: Array) -> None:
        """Compute the gradient dy^T x of parameter `index`, unless its lr_mult is 0."""
        if self.propagate_to_params[index]:
            self.backend.gemm(dy, x, self.blobs[index].diff, transpose_a=True, accumulate=self.accumulate(index))

    def compute_bias_gradient(self, index: int, dy: Array) -> None:
        """Compute the gradient of bias `index`, the sum of dy over all rows, unless its lr_mult is 0."""
        if self.propagate_to_params[index]:
            self.backend.reduce(identity, (dy,), (self.blobs[index].diff,), accumulate=self.accumulate(index))

    # -- running -------------------------------------------------------------------------------------

    def _first_states(self, bottom: Blobs) -> list[Array]:
        hidden = self._hidden_bottoms(bottom)
        return [blob.data.reshape(blob.shape[1:]) for blob in hidden] or self._states_before()

    def _states_before(self) -> list[Array]:
        """Return the buffers with the stored states before this pass."""
        return [self.step_buffer(f"state {index}") for index in range(self.state_count)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, sums = self.backend, self.preactivations()
        rows = self.as_rows(sums)
        backend.gemm(self._x.load(bottom[0].data), self.blobs[0].data, rows, transpose_b=True)
        backend.apply(total_with_channel, (rows, self.blobs[1].data), (rows,))
        if self._static is not None:
            shared = self.scratch("static sums", sums.shape[1:]).array
            backend.gemm(self._static_x.load(self._static.data), self.blobs[2].data, shared, transpose_b=True)
            backend.apply(total_with_channel, (sums, shared), (sums,))
        exposed = self.param.recurrent_param.expose_hidden
        if not exposed:
            for stored, before in zip(self._stored_states, self._states_before(), strict=True):
                backend.copy(stored, before)
        last = self.forward_steps(bottom[1].data, self._first_states(bottom), top[0].data)
        targets = [blob.data.reshape(blob.shape[1:]) for blob in top[1:]] if exposed else self._stored_states
        for value, target in zip(last, targets, strict=True):
            backend.copy(value, target)
        self.save_top(top)
        if self.param.recurrent_param.debug_info and backend.holds_values:
            self._log_blobs()

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.backward_steps(bottom[1].data, self._first_states(bottom), top[0])
        sums = self.preactivations()
        rows = self.as_rows(sums)
        self.compute_bias_gradient(1, rows)
        self.compute_weight_gradient(0, rows, self._x.target(bottom[0].data))
        if propagate_down[0]:
            self.backend.gemm(rows, self.blobs[0].data, self._dx.target(bottom[0].diff))
            self._dx.store(bottom[0].diff)
        if self._static is not None:
            self._static_backward(sums, self._static, propagate_down[2])
        first = len(bottom) - len(self._hidden_bottoms(bottom))
        for blob, needs_gradient in zip(bottom[first:], propagate_down[first:], strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)

    def _static_backward(self, sums: Array, static: Blob, down: bool) -> None:
        if not down and not self.propagate_to_params[2]:
            return
        shared = self.scratch("static gradient", sums.shape[1:]).array
        self.backend.reduce(identity, (sums,), (shared,))
        self.compute_weight_gradient(2, shared, self._static_x.target(static.data))
        if down:
            self.backend.gemm(shared, self.blobs[2].data, self._static_dx.target(static.diff))
            self._static_dx.store(static.diff)

    # -- debug_info ----------------------------------------------------------------------------------

    def capture_blocker(self) -> str | None:
        return "its debug_info reads numbers on the host" if self.param.recurrent_param.debug_info else None

    def _log_blobs(self) -> None:
        for layer, blob, values in self.inner_blobs():
            mean = float(np.abs(self.backend.to_host(values)).mean())
            log.info("    [Forward] Layer %s_%s, top blob %s data: %.6g", self.name, layer, blob, mean)


@register_layer("LSTM")
class LSTMLayer(RecurrentLayer):
    """The hidden states of an LSTM (Caffe's `lstm_layer.cpp`, after Donahue et al. 2015).

    (i, f, o, g) = W_xc x_t + b_c + W_static x_static + W_hc (cont_t h_t-1), each of D numbers;
    c_t = cont_t sigmoid(f) c_t-1 + sigmoid(i) tanh(g); h_t = sigmoid(o) tanh(c_t). The top is h (T, N, D).
    Parameters: W_xc (4 D, K), b_c (4 D,), W_static (4 D, K_static) with a static input, W_hc (4 D, D). States: h, c.
    """

    state_count = 2
    gate_count = 4

    def add_recurrent_parameters(self, size: int) -> None:
        self.add_parameter((4 * size, size), self.param.recurrent_param.weight_filler)

    def forward_steps(self, cont: Array, first: Sequence[Array], top: Array) -> Sequence[Array]:
        hidden, cell = first
        gates, cells, carried = self.preactivations(), self.steps_buffer("cells"), self.steps_buffer("carried")
        weights, steps = self.blobs[-1].data, cont.shape[0]
        self.mask_state(hidden, cont[0], carried[0])
        for t in range(steps):
            self.backend.gemm(carried[t], weights, gates[t], transpose_b=True, accumulate=True)
            following = (cont[t + 1], carried[t + 1]) if t + 1 < steps else ()
            self.backend.lstm_step_forward(gates[t], cell, cont[t], cells[t], top[t], *following)
            cell = cells[t]
        return top[steps - 1], cell

    def backward_steps(self, cont: Array, first: Sequence[Array], top: Blob) -> None:
        backend, weights, steps = self.backend, self.blobs[-1].data, cont.shape[0]
        gates, cells, carried = self.preactivations(), self.steps_buffer("cells"), self.steps_buffer("carried")
        d_carried, d_cell = self.step_buffer("hidden gradient"), self.step_buffer("cell gradient")
        backend.fill(d_cell, 0)
        for t in reversed(range(steps)):
            before = cells[t - 1] if t else first[1]
            following = (cont[t + 1], d_carried) if t + 1 < steps else ()
            step = gates[t]
            backend.lstm_step_backward(step, before, cont[t], cells[t], d_cell, top.diff[t], step, *following)
            if t:
                backend.gemm(step, weights, d_carried)
        self.compute_weight_gradient(len(self.blobs) - 1, self.as_rows(gates), self.as_rows(carried))

    def inner_blobs(self) -> NamedArrays:
        gates, cells, carried = self.preactivations(), self.steps_buffer("cells"), self.steps_buffer("carried")
        for t in range(cells.shape[0]):
            yield f"h_conted_{t}", f"h_conted_{t}", carried[t]
            yield f"unit_{t + 1}", f"gates_{t + 1}", gates[t]
            yield f"unit_{t + 1}", f"c_{t + 1}", cells[t]


@register_layer("LSTMUnit")
class LSTMUnitLayer(Layer):
    """One time step of an LSTM (Caffe's `lstm_unit_layer.cpp`).

    Bottoms: c_t-1 (1, N, D), the gates' inputs (1, N, 4 D) in the order i, f, o, g, and cont (1, N). Tops: c_t and h_t,
    (1, N, D).
    """

    bottoms = (3, 3)
    tops = (2, 2)
    no_gradient_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        cell, gates, cont = (blob.shape for blob in bottom)
        if len(cell) != 3 or cell[0] != 1 or gates != (1, cell[1], 4 * cell[2]) or cont != (1, cell[1]):
            raise self.shape_error("needs bottoms of shapes 1 N D, 1 N 4D and 1 N", *bottom)
        for blob in top:
            blob.reshape(cell)

    def _rows(self, *arrays: Array) -> list[Array]:
        """Return views of the arrays without the first axis."""
        return [array.reshape(array.shape[1:]) for array in arrays]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        before, gates, cont, cell, hidden = self._rows(*(blob.data for blob in (*bottom, *top)))
        activations = self._activations(gates)
        self.backend.copy(gates, activations)
        self.backend.lstm_unit_forward(activations, before, cont, cell, hidden)
        self.save_top(top)

    def _activations(self, gates: Array) -> Array:
        return self.scratch("activations", gates.shape).array

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0] and not propagate_down[1]:
            return
        before, gates, cont = self._rows(*(blob.data for blob in bottom))
        cell, d_cell, d_hidden = self._rows(self.saved_top(top), top[0].diff, top[1].diff)
        d_before, d_gates = self._rows(bottom[0].diff, bottom[1].diff)
        d_before = d_before if propagate_down[0] else self.scratch("cell gradient", before.shape).array
        d_gates = d_gates if propagate_down[1] else self.scratch("gates' gradient", gates.shape).array
        self.backend.copy(self._activations(gates), d_gates)
        self.backend.copy(d_cell, d_before)
        self.backend.lstm_unit_backward(d_gates, before, cont, cell, d_before, d_hidden)


@register_layer("RNN")
class RNNLayer(RecurrentLayer):
    """The outputs of a simple recurrent net (Caffe's `rnn_layer.cpp`).

    h_t = tanh(W_xh x_t + b_h + W_static x_static + W_hh (cont_t h_t-1)); o_t = tanh(W_ho h_t + b_o). The top is o
    (T, N, D). Parameters: W_xh (D, K), b_h (D,), W_static (D, K_static) with a static input, W_hh (D, D),
    W_ho (D, D), b_o (D,). State: h.
    """

    state_count = 1
    gate_count = 1

    def add_recurrent_parameters(self, size: int) -> None:
        param = self.param.recurrent_param
        self.add_parameter((size, size), param.weight_filler)
        self.add_parameter((size, size), param.weight_filler)
        self.add_parameter((size,), param.bias_filler)

    def forward_steps(self, cont: Array, first: Sequence[Array], top: Array) -> Sequence[Array]:
        backend, hidden = self.backend, first[0]
        states, carried = self.preactivations(), self.steps_buffer("carried")
        *_, w_hh, w_ho, b_o = (blob.data for blob in self.blobs)
        for t in range(cont.shape[0]):
            self.mask_state(hidden, cont[t], carried[t])
            backend.gemm(carried[t], w_hh, states[t], transpose_b=True, accumulate=True)
            backend.apply(hyperbolic_tangent, (states[t],), (states[t],))
            hidden = states[t]
        y = self.as_rows(top)
        backend.gemm(self.as_rows(states), w_ho, y, transpose_b=True)
        backend.apply(total_with_channel, (y, b_o), (y,))
        backend.apply(hyperbolic_tangent, (y,), (y,))
        return (hidden,)

    def backward_steps(self, cont: Array, first: Sequence[Array], top: Blob) -> None:
        backend, count = self.backend, len(self.blobs)
        states, carried = self.preactivations(), self.steps_buffer("carried")
        *_, w_hh, w_ho, _ = (blob.data for blob in self.blobs)
        dy, d_states = self.as_rows(self.steps_buffer("outputs' gradient")), self.steps_buffer("states' gradient")
        backend.apply(tanh_gradient, (self.as_rows(self.saved_top([top])), self.as_rows(top.diff)), (dy,))
        self.compute_bias_gradient(count - 1, dy)
        self.compute_weight_gradient(count - 2, dy, self.as_rows(states))
        backend.gemm(dy, w_ho, self.as_rows(d_states))
        back = self.step_buffer("carried gradient")
        for t in reversed(range(cont.shape[0])):
            backend.apply(tanh_gradient, (states[t], d_states[t]), (states[t],))
            if t:
                backend.gemm(states[t], w_hh, back)
                self.mask_state(back, cont[t], back)
                backend.add(back, d_states[t - 1])
        self.compute_weight_gradient(count - 3, self.as_rows(states), self.as_rows(carried))

    def inner_blobs(self) -> NamedArrays:
        states, carried = self.preactivations(), self.steps_buffer("carried")
        for t in range(states.shape[0]):
            yield f"h_conted_{t}", f"h_conted_{t}", carried[t]
            yield f"h_neuron_{t + 1}", f"h_{t + 1}", states[t]
