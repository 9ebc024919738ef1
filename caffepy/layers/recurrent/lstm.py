"""LSTM (Hochreiter and Schmidhuber 1997, with forget gates) and LSTMUnit, one time step of it."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.recurrent.base import NamedArrays, RecurrentLayer


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
