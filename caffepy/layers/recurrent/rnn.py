"""RNN."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.layers.core.base import register_layer
from caffepy.layers.core.formulas import hyperbolic_tangent, tanh_gradient, total_with_channel
from caffepy.layers.recurrent.base import NamedArrays, RecurrentLayer


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
