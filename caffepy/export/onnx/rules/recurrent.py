"""Layers over time steps, unrolled."""

from __future__ import annotations

from caffepy.export.onnx.graph import LayerView, exports, product_of


class _Unrolled:
    """What LSTM and RNN share: the sums that the input brings to each time step, and what is carried on.

    Args:
        view: the layer.
        states: how many states it has.
        sums: S / D.
    """

    def __init__(self, view: LayerView, states: int, sums: int) -> None:
        self.view = view
        param = view.param.recurrent_param
        steps, streams = view.bottoms[0].shape[:2]
        view.refuse_varying(view.bottoms[0], (0, 1))
        self.steps, self.streams, self.size, self.rows = steps, streams, param.num_output, sums * param.num_output
        exposed = states if param.expose_hidden else 0
        self.has_static = len(view.bottoms) > 2 + exposed
        shape = (streams, self.size)
        self.states = [view.reshaped(value, shape) for value in view.inputs[len(view.inputs) - exposed :] if exposed]
        self.states = self.states or [view.floats([[0.0] * self.size] * streams, "zeros") for _ in range(states)]
        self.inputs = view.add_many("Split", steps, self._input_sums(), view.ints(*[1] * steps), axis=0)
        column = view.reshaped(view.inputs[1], (steps, streams, 1))
        self.conts = view.add_many("Split", steps, column, view.ints(*[1] * steps), axis=0)

    def _input_sums(self) -> str:
        """W x + b + W_static x_static, (T, N, S)."""
        view = self.view
        flat = view.reshaped(view.x, (self.steps * self.streams, product_of(view.bottoms[0].shape[2:])))
        sums = view.add("Gemm", flat, view.parameter(0), view.parameter(1), transB=1)
        sums = view.reshaped(sums, (self.steps, self.streams, self.rows))
        if not self.has_static:
            return sums
        fixed = view.reshaped(view.inputs[2], (self.streams, product_of(view.bottoms[2].shape[1:])))
        return view.add("Add", sums, view.add("Gemm", fixed, view.parameter(2), transB=1))

    def at(self, step: int, hidden: str, weights: str) -> tuple[str, str]:
        """The sums of a time step, (N, S), and its `cont`, (N, 1)."""
        view = self.view
        cont = view.reshaped(self.conts[step], (self.streams, 1))
        own = view.reshaped(self.inputs[step], (self.streams, self.rows))
        return view.add("Gemm", view.add("Mul", hidden, cont), weights, own, transB=1), cont

    def tops(self, outputs: list[str], last: list[str]) -> list[str]:
        """The layer's tops: all outputs as (T, N, D), and the last states where they are exposed."""
        view, shape = self.view, (1, self.streams, self.size)
        rows = [view.reshaped(value, shape) for value in outputs]
        whole = view.add("Concat", *rows, axis=0)
        exposed = view.param.recurrent_param.expose_hidden
        return [whole, *(view.reshaped(value, shape) for value in last if exposed)]


@exports("LSTM", form="Gemm, Sigmoid, Tanh, Mul, Add for each time step; states begin at 0", composite=True)
def lstm(view: LayerView) -> list[str]:
    unrolled = _Unrolled(view, 2, 4)
    weights = view.parameter(len(view.layer.blobs) - 1)
    (hidden, cell), outputs = unrolled.states, []
    for step in range(unrolled.steps):
        sums, cont = unrolled.at(step, hidden, weights)
        hidden, cell = _unit(view, sums, cell, cont, unrolled.size)
        outputs.append(hidden)
    return unrolled.tops(outputs, [hidden, cell])


def _unit(view: LayerView, sums: str, cell: str, cont: str, size: int) -> tuple[str, str]:
    """h and c of a time step."""
    gates = view.add_many("Split", 4, sums, view.ints(*[size] * 4), axis=-1)
    into, forget, out = (view.add("Sigmoid", gate) for gate in gates[:3])
    kept = view.add("Mul", view.add("Mul", cell, cont), forget)
    cell = view.add("Add", kept, view.add("Mul", into, view.add("Tanh", gates[3])))
    return view.add("Mul", out, view.add("Tanh", cell)), cell


@exports("LSTMUnit", form="Split, Sigmoid, Tanh, Mul, Add", composite=True)
def lstm_unit(view: LayerView) -> list[str]:
    cont = view.add("Unsqueeze", view.inputs[2], view.ints(2))
    hidden, cell = _unit(view, view.inputs[1], view.x, cont, view.bottoms[0].shape[2])
    return [cell, hidden]


@exports("RNN", form="Gemm, Tanh for each time step; the state begins at 0", composite=True)
def rnn(view: LayerView) -> list[str]:
    unrolled, count = _Unrolled(view, 1, 1), len(view.layer.blobs)
    own, outward, term = (view.parameter(index) for index in range(count - 3, count))
    (hidden,), outputs = unrolled.states, []
    for step in range(unrolled.steps):
        hidden = view.add("Tanh", unrolled.at(step, hidden, own)[0])
        outputs.append(view.add("Tanh", view.add("Gemm", hidden, outward, term, transB=1)))
    return unrolled.tops(outputs, [hidden])
