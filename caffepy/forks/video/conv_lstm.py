"""ConvLSTM: an LSTM over sequences of maps, whose products with weights are convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array
from caffepy.backend.formulas import product_with_channel
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.scale import ScaleLayer

STATES = ("hidden", "cell")
STATE_AXES = 5
PEEPHOLES = ("input", "forget", "output")
KINDS = ("input", "hidden", "all")
"""Values of `type` of `lstm_conv_param`."""
MOST_OUTPUTS = 2**29


def _gates_of(
    name: str, settings: caffe_pb2.ConvolutionParameter, of_x: bool, context: LayerContext
) -> ConvolutionLayer:
    """Return the layer that convolves all time steps of x, or one hidden state, to the four gates."""
    param = caffe_pb2.LayerParameter(name=name, type="Convolution", convolution_param=settings)
    inner = param.convolution_param
    inner.ClearField("type")
    inner.num_output *= 4
    inner.axis = 2 if of_x else 1
    inner.bias_term = inner.bias_term and not of_x
    return ConvolutionLayer(param, context)


def _peephole(name: str, settings: caffe_pb2.LSTMDebugParameter, context: LayerContext) -> ScaleLayer:
    """Return the layer that weighs a cell for one gate."""
    param = caffe_pb2.LayerParameter(name=name, type="Scale")
    param.scale_param.axis, param.scale_param.num_axes = settings.axis_hadamard, settings.num_axes_hadamard
    return ScaleLayer(param, context)


@register_layer("ConvLSTM")
class ConvLSTMLayer(Layer):
    """The hidden states of a convolutional LSTM (ConvLSTM-for-Caffe's `conv_lstm_layer.cpp`; Shi et al. 2015).

    (i, f, o, g) = W_x * x_t + W_h * (cont_t h_t-1) + b + (w_i c_t-1, w_f c_t-1, w_o c_t-1, 0), each of D channels,
    where * convolves; c_t = cont_t sigmoid(f) c_t-1 + sigmoid(i) tanh(g); h_t = sigmoid(o) tanh(c_t). D is `num_output`
    of `lstm_conv_param`, which is given once, or twice with `type` "input" for W_x and "hidden" for W_h. It has
    Convolution's settings; the channels are axis 2, W_x has no bias, and the maps must keep their size.
    As in the fork, w_i, w_f and w_o weigh c_t-1 also where cont_t is 0, and w_o weighs c_t-1 in place of c_t.
    `disable_hadamard` leaves the three out, and `ignore_x` leaves out W_x.

    Bottoms: x (T, N, C, H, W); cont (T, N), 0 where a sequence begins, else 1; with `expose_hidden` of
    `recurrent_param` the first h and c, (1, N, D, H, W) each. Tops: h (T, N, D, H, W); with `expose_hidden` the last h
    and c, (1, N, D, H, W) each. Unlike those of LSTM, these bottoms and tops have gradients. Without `expose_hidden`
    the states are those of the last pass, initially 0, and no gradient passes from one pass to another. No other field
    of `recurrent_param` has an effect.

    Parameters, as the fork's files have them: W_x (4 D, C, kernel_h, kernel_w); two of shape (1,) without effect; W_h
    (4 D, D, kernel_h, kernel_w); b (4 D,), unless `bias_term` is false; w_i, w_f and w_o, initially 1, of the shape of
    `num_axes_hadamard` axes of a state from `axis_hadamard` on, by default (H, W); two of shape (1,) without effect.

    Raises:
        ConfigError: a setting is missing or contradictory, or the bottoms or tops do not match `expose_hidden`.
        ShapeError: the bottoms do not fit each other or the parameters, or a convolution changes the maps' size.
    """

    bottoms = (2, 5)
    learns = True
    tops = (1, 3)
    no_gradient_bottoms = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._exposed = self.param.recurrent_param.expose_hidden
        if len(bottom) != (4 if self._exposed else 2) or len(top) != (3 if self._exposed else 1):
            raise self.error(
                "takes x and cont and gives h; with expose_hidden it also takes and gives h and c. It has "
                f"{len(bottom)} bottoms and {len(top)} tops (expose_hidden: {self._exposed}); a static input is not "
                "supported"
            )
        self._use_x = not self.param.lstm_debug_param.ignore_x
        hidden = self._convolution("hidden")
        self._size = hidden.settings.num_output // 4
        steps, streams, _, *spatial = self._check_bottoms(bottom)
        # The top, the gates and their gradient, and for each time step two states.
        self.check_memory(4 * 12 * steps * streams * self._size * spatial[0] * spatial[1], "its states")
        names = ("gates", "carried", "sums", "cell before", "term")
        self._gates, self._carried, self._sums, self._cell, self._term = (
            Blob(self.backend, name=f"{self.name}'s {name}") for name in names
        )
        self._set_shapes(bottom)
        self._own: list[tuple[Layer, int]] = []
        self._stored: list[Array] = []
        if self._use_x:
            self._x_convolution = self._convolution("input")
            self._add(self._x_convolution, bottom[0], self._gates)
        self._add_idle()
        self._h_convolution = hidden
        self._add(hidden, self._carried, self._sums)
        self._peepholes: list[ScaleLayer] = []
        debug = self.param.lstm_debug_param
        if debug.axis_hadamard + debug.num_axes_hadamard > STATE_AXES:
            raise self.error(
                f"num_axes_hadamard {debug.num_axes_hadamard} from axis_hadamard {debug.axis_hadamard} on goes past "
                f"the {STATE_AXES} axes of a state"
            )
        for gate in () if debug.disable_hadamard else PEEPHOLES:
            self._peepholes.append(_peephole(f"{self.random_name}/{gate}", debug, self.context))
            self._add(self._peepholes[-1], self._cell, self._term)
        self._add_idle()

    def _convolution(self, kind: str) -> ConvolutionLayer:
        """Return the layer that convolves x ("input") or the hidden state ("hidden")."""
        settings = self.param.lstm_conv_param
        if len(settings) not in (1, 2) or any(one.type not in KINDS for one in settings):
            types = [one.type for one in settings]
            raise self.error(f"needs lstm_conv_param once or twice, of type {', '.join(KINDS)}; found {types}")
        if not all(1 <= one.num_output < MOST_OUTPUTS and one.num_output == settings[0].num_output for one in settings):
            found = [one.num_output for one in settings]
            raise self.error(f"lstm_conv_param needs one num_output from 1 to {MOST_OUTPUTS - 1}; found {found}")
        fitting = [one for one in settings if one.type in (kind, "all")]
        if not fitting:
            raise self.error(f'needs an lstm_conv_param of type "{kind}" or "all"')
        return _gates_of(f"{self.random_name}/{kind}", fitting[0], kind == "input", self.context)

    def _add(self, layer: Layer, x: Blob, y: Blob) -> None:
        """Set a layer up and take its parameters."""
        layer.setup([x], [y])
        self._own.append((layer, len(self.blobs)))
        self.blobs += layer.blobs
        self.propagate_to_params += layer.propagate_to_params

    def _add_idle(self) -> None:
        """Make two parameters that only the fork's files need."""
        while len(self.param.param) < len(self.blobs) + 2:
            self.param.param.add()
        for _ in STATES:
            spec = self.param.param[len(self.blobs)]
            spec.lr_mult = spec.decay_mult = 0
            self.add_parameter((1,), caffe_pb2.FillerParameter(value=0))

    def _check_bottoms(self, bottom: Blobs) -> tuple[int, ...]:
        """Return x's shape."""
        x, cont, *states = bottom
        if len(x.shape) != 5 or min(x.shape) < 1:
            raise self.shape_error("x needs five axes, (time steps, streams, channels, height, width), none empty", x)
        if cont.shape != x.shape[:2]:
            raise self.shape_error("cont must have x's time steps and streams", x, cont)
        for blob in states:
            if blob.shape != (1, x.shape[1], self._size, *x.shape[3:]):
                problem = f"a state must have x's streams, height and width, and {self._size} channels"
                raise self.shape_error(problem, x, blob)
        return x.shape

    def _set_shapes(self, bottom: Blobs) -> None:
        steps, streams, _, *spatial = bottom[0].shape
        self._gates.reshape((steps, streams, 4 * self._size, *spatial))
        self._carried.reshape((streams, self._size, *spatial))
        for blob in (self._cell, self._term):
            blob.reshape((1, *self._carried.shape))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = self._check_bottoms(bottom)
        self._set_shapes(bottom)
        wanted = self._gates.shape
        if self._use_x:
            self._x_convolution.reshape([bottom[0]], [self._gates])
        self._h_convolution.reshape([self._carried], [self._sums])
        if self._gates.shape != wanted or self._sums.shape != wanted[1:]:
            raise self.shape_error("a convolution changes the maps' size; choose kernel_size, pad and stride", *bottom)
        for peephole in self._peepholes:
            peephole.reshape([self._cell], [self._term])
        for number, blob in enumerate(top):
            blob.reshape((1 if number else shape[0], *self._carried.shape))
        if not self._exposed and (self._shape is None or shape[1:] != self._shape[1:]):
            self._stored = [self.backend.zeros(self._rows) for _ in STATES]
        self._shape = shape

    @property
    def _rows(self) -> tuple[int, int]:
        """The streams, and the numbers of a stream's state."""
        return self._carried.shape[0], self._carried.count // self._carried.shape[0]

    def state(self) -> Sequence[Array]:
        return self._stored

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        return not param.recurrent_param.expose_hidden

    def _steps(self, name: str) -> Array:
        """Return a buffer of states for all time steps."""
        return self.scratch(name, (self._gates.shape[0], *self._rows)).array

    def _state(self, name: str) -> Array:
        return self.scratch(name, self._rows).array

    def _all_gates(self) -> Array:
        streams, numbers = self._rows
        return self.scratch("gates", (self._gates.shape[0], streams, 4 * numbers)).array

    def _part(self, gates: Array, t: int, number: int) -> Array:
        """Return the view (1, N, D, H, W) of a gate at time step t."""
        first = number * self._size
        return gates.reshape(self._gates.shape)[t : t + 1, :, first : first + self._size]

    def _share_parameters(self) -> None:
        for layer, first in self._own:
            end = first + len(layer.blobs)
            layer.blobs, layer.propagate_to_params = self.blobs[first:end], self.propagate_to_params[first:end]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, cont, gates = self.backend, bottom[1].data, self._all_gates()
        self._share_parameters()
        if self._use_x:
            self._x_convolution.forward([bottom[0]], [self._gates])
            backend.copy(self._gates.data, gates.reshape(self._gates.shape))
        else:
            backend.fill(gates, 0.0)
        first = [self._state(f"first {name}") for name in STATES]
        for number, before in enumerate(first):
            if self._exposed:
                backend.copy(bottom[2 + number].data[0], before.reshape(self._carried.shape))
            else:
                backend.copy(self._stored[number], before)
        hidden, cells, carried = (self._steps(name) for name in ("hidden", "cells", "carried"))
        cell, steps = first[1], len(cont)
        backend.apply(product_with_channel, (first[0], cont[0]), (carried[0],), axis=0)
        for t in range(steps):
            backend.copy(carried[t].reshape(self._carried.shape), self._carried.data)
            self._h_convolution.forward([self._carried], [self._sums])
            backend.add(self._sums.data, gates[t].reshape(self._sums.shape))
            if self._peepholes:
                backend.copy(cell.reshape(self._cell.shape), self._cell.data)
            for number, peephole in enumerate(self._peepholes):
                peephole.forward([self._cell], [self._term])
                backend.add(self._term.data, self._part(gates, t, number))
            following = (cont[t + 1], carried[t + 1]) if t + 1 < steps else ()
            backend.lstm_step_forward(gates[t], cell, cont[t], cells[t], hidden[t], *following)
            cell = cells[t]
        backend.copy(hidden.reshape(top[0].shape), top[0].data)
        for number, last in enumerate((hidden[steps - 1], cell)):
            if self._exposed:
                backend.copy(last.reshape(self._carried.shape), top[1 + number].data[0])
            else:
                backend.copy(last, self._stored[number])

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, cont, gates = self.backend, bottom[1].data, self._all_gates()
        self._share_parameters()
        dy, cells, carried = (self._steps(name) for name in ("hidden", "cells", "carried"))
        backend.copy(top[0].diff, dy.reshape(top[0].shape))
        d_carried, d_cell = (self._state(f"gradient of the {name}") for name in STATES)
        for number, gradient in enumerate((d_carried, d_cell)):
            if self._exposed:
                backend.copy(top[1 + number].diff[0], gradient.reshape(self._carried.shape))
            else:
                backend.fill(gradient, 0.0)
        steps, following = len(cont), self.scratch("ones", (self._rows[0],)).array
        backend.fill(following, 1.0)
        for t in reversed(range(steps)):
            before = cells[t - 1] if t else self._state("first cell")
            backend.lstm_step_backward(
                gates[t], before, cont[t], cells[t], d_cell, dy[t], gates[t], following, d_carried
            )
            following = cont[t]
            self._peepholes_backward(gates, t, before, d_cell)
            backend.copy(carried[t].reshape(self._carried.shape), self._carried.data)
            backend.copy(gates[t].reshape(self._sums.shape), self._sums.diff)
            self._h_convolution.backward([self._sums], [True], [self._carried])
            backend.copy(self._carried.diff, d_carried.reshape(self._carried.shape))
        if self._use_x:
            backend.copy(gates.reshape(self._gates.shape), self._gates.diff)
            self._x_convolution.backward([self._gates], propagate_down[:1], bottom[:1])
        elif propagate_down[0]:
            backend.fill(bottom[0].diff, 0.0)
        if self._exposed and propagate_down[2]:
            backend.apply(product_with_channel, (d_carried, cont[0]), (d_carried,), axis=0)
            backend.copy(d_carried.reshape(self._carried.shape), bottom[2].diff[0])
        if self._exposed and propagate_down[3]:
            backend.copy(d_cell.reshape(self._carried.shape), bottom[3].diff[0])

    def _peepholes_backward(self, gates: Array, t: int, before: Array, d_cell: Array) -> None:
        """Add to the gradient of the cell before time step t that by way of the gates, whose gradients are known."""
        if self._peepholes:
            self.backend.copy(before.reshape(self._cell.shape), self._cell.data)
        for number, peephole in enumerate(self._peepholes):
            self.backend.copy(self._part(gates, t, number), self._term.diff)
            peephole.backward([self._term], [True], [self._cell])
            self.backend.add(self._cell.diff, d_cell.reshape(self._cell.shape))
