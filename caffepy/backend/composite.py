"""The larger primitives, composed of elementary ones: what a backend has until it brings kernels of its own for them.

Owns the formulas of batch normalisation, of ReLU's gradient and of dropout. The CPU uses those that it has no kernels
for; on the GPU they are the plain oracle that its kernels are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import sqrt

from caffepy.backend.elementwise import Channel, Each, Expression, Scalar, expression
from caffepy.backend.handles import Convolution
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, BatchNormState, Counter, RandomStream

_Draw = tuple[int, tuple[int, ...]]
"""Which random numbers a buffer holds: the stream's number and the shape."""


@expression
def scaled(x: Each, factor: Scalar) -> Each:
    return x * factor


@expression
def squared_distance(x: Each, mean: Channel, factor: Scalar) -> Each:
    return (x - mean) * (x - mean) * factor


@expression
def finished(
    mean: Each, variance: Each, old_mean: Each, old_variance: Each,
    fraction: Scalar, correction: Scalar, epsilon: Scalar,
) -> tuple[Each, Each, Each]:  # fmt: skip
    return 1 / sqrt(variance + epsilon), old_mean * fraction + mean, old_variance * fraction + variance * correction


@expression
def running_count(count: Each, fraction: Scalar) -> Each:
    return count * fraction + 1


@expression
def moments(total: Each, squares: Each, per_element: Scalar) -> tuple[Each, Each]:
    mean = total * per_element
    return mean, max(squares * per_element - mean * mean, 0.0)


@expression
def stored_statistics(mean_sum: Each, variance_sum: Each, count: Channel, epsilon: Scalar) -> tuple[Each, Each]:
    factor = 0.0 if count == 0 else 1 / count
    return mean_sum * factor, 1 / sqrt(variance_sum * factor + epsilon)


@expression
def normalise(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return (x - mean) * inverse * scale + bias


@expression
def normalise_relu(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return max((x - mean) * inverse * scale + bias, 0.0)


@expression
def plus_rectified(x: Each, y: Each) -> Each:
    return max(x + y, 0.0)


@expression
def plus(x: Each, y: Each) -> Each:
    return x + y


@expression
def rectified(x: Each) -> Each:
    return max(x, 0.0)


@expression
def where_positive(y: Each, dy: Each) -> Each:
    return dy if y > 0 else 0.0


@expression
def where_normal_positive(x: Each, dy: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return dy if (x - mean) * inverse * scale + bias > 0 else 0.0


@expression
def gradient_sums(x: Each, dy: Each, mean: Channel, inverse: Channel) -> tuple[Each, Each]:
    return dy * ((x - mean) * inverse), dy


@expression
def input_gradient(  # noqa: PLR0913 -- a formula
    x: Each, dy: Each, mean: Channel, inverse: Channel, scale: Channel,
    sum_dy_x: Channel, sum_dy: Channel, per_element: Scalar,
) -> Each:  # fmt: skip
    normal = (x - mean) * inverse
    return (dy - (sum_dy + sum_dy_x * normal) * per_element) * inverse * scale


@expression
def times(x: Each, y: Channel) -> Each:
    return x * y


@expression
def identity(x: Each) -> Each:
    return x


@expression
def drop(x: Each, chance: Each, ratio: Scalar, scale: Scalar) -> Each:
    return x * scale if chance >= ratio else 0.0


def _address(array: Array) -> int:
    interface = getattr(array, "__array_interface__", None) or array.__cuda_array_interface__
    return int(interface["data"][0])


class Composite(Backend):
    """A `Backend` whose larger primitives are made of its elementary ones."""

    def __init__(self) -> None:
        self._chances: dict[_Draw, tuple[Counter, RandomStream, Array]] = {}
        self._temporary: dict[tuple[str, tuple[int, ...]], Array] = {}

    def _buffer(self, purpose: str, shape: tuple[int, ...]) -> Array:
        """Memory that lasts for one primitive."""
        key = (purpose, tuple(shape))
        if key not in self._temporary:
            self._temporary[key] = self.zeros(tuple(shape))
        return self._temporary[key]

    # -- batch normalisation --------------------------------------------------------------------------

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        # Two passes: E(x^2) - E(x)^2 loses all digits where the mean is large.
        elements = math.prod(x.shape) // max(x.shape[1], 1)
        per_element = 1 / max(elements, 1)
        variance = self._buffer("variance", n.mean.shape)
        self.reduce(scaled, (x, per_element), (n.mean,))
        self.reduce(squared_distance, (x, n.mean, per_element), (variance,))
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        variance = self._buffer("variance", n.mean.shape)
        self.apply(moments, (sums[0], sums[1], 1 / max(elements, 1)), (n.mean, variance), axis=0)
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_finish(self, variance: Array, elements: int, n: BatchNormState) -> None:
        correction = elements / (elements - 1) if elements > 1 else 1.0
        inputs = (n.mean, variance, n.sum_mean, n.sum_variance, n.fraction, correction, n.epsilon)
        self.apply(finished, inputs, (n.inverse, n.sum_mean, n.sum_variance), axis=0)
        self.apply(running_count, (n.count, n.fraction), (n.count,), axis=0)

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        plan.forward(x, weights, bias, y)
        self.apply(plus_rectified if relu else plus, (y, residual), (y,))

    def batch_norm_load(self, n: BatchNormState) -> None:
        count = self.view(n.count, ())
        self.apply(stored_statistics, (n.sum_mean, n.sum_variance, count, n.epsilon), (n.mean, n.inverse))

    def batch_norm_forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None = None, relu: bool = False,
        mask: Array | None = None,
    ) -> None:  # fmt: skip
        inputs = (x, n.mean, n.inverse, n.scale, n.bias)
        if residual is None and mask is None:
            self.apply(normalise_relu if relu else normalise, inputs, (y,))
            return
        self.apply(normalise, inputs, (y,))
        if residual is not None:
            self.apply(plus, (y, residual), (y,))
        if mask is not None:
            self._write_mask(y, mask)
        if relu:
            self.apply(rectified, (y,), (y,))

    def _write_mask(self, y: Array, mask: Array) -> None:
        """One bit an element, worked out on the host: only backends without kernels of their own come here."""
        import numpy as np

        bits = np.packbits(self.to_host(self.flat(y)) > 0, bitorder="little")
        host = np.zeros(mask.shape, np.uint8)
        host[: len(bits)] = bits
        self.from_host(host, mask)

    def _read_mask(self, mask: Array, shape: tuple[int, ...]) -> Array:
        import numpy as np

        bits = np.unpackbits(self.to_host(mask), bitorder="little")[: math.prod(shape)]
        array = self._buffer("mask", shape)
        self.from_host(bits.astype(np.float32), self.flat(array))
        return array

    def batch_norm_backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        g = dys[0]
        if len(dys) > 1:
            assert total is not None, "several gradients need an array for their sum"
            self.add_n(dys, total)
            g = total
        if relu:
            out = total if total is not None else self._buffer("gradient", x.shape)
            if mask is not None:
                self.apply(where_positive, (self._read_mask(mask, x.shape), g), (out,))
            else:
                self.apply(where_normal_positive, (x, g, n.mean, n.inverse, n.scale, n.bias), (out,))
            g = out
        elif total is not None and g is not total:
            self.copy(g, total)
        self.reduce(gradient_sums, (x, g, n.mean, n.inverse), sums)

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        if relu:
            self.apply(where_normal_positive, (x, dy, n.mean, n.inverse, n.scale, n.bias), (dx,))
            dy = dx
        per_element = x.shape[1] / max(math.prod(x.shape), 1)
        inputs = (x, dy, n.mean, n.inverse, n.scale, *sums, per_element)
        self.apply(input_gradient, inputs, (dx,))

    # -- products and activation ----------------------------------------------------------------------

    def gemm_and_apply(
        self,
        expression: Expression,
        a: Array,
        b: Array,
        channel: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        self.gemm(a, b, out, transpose_a, transpose_b)
        self.apply(expression, (out, channel), (out,))

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        self.activation_backward(where_positive, y, dy, dx, dbias, accumulate)

    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        self.apply(expression, (y, dy), (dx,))
        if dbias is not None:
            self.reduce(identity, (dx,), (dbias,), accumulate=accumulate)

    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        key = (stream.stream, tuple(source.shape))
        cached = self._chances.get(key)
        chances = self.zeros(source.shape) if cached is None else cached[2]
        if cached is None or cached[:2] != (counter, stream):
            self.random_uniform(chances, stream, counter)
            self._chances[key] = (counter, stream, chances)
        self.apply(drop, (source, chances, ratio, 1 / (1 - ratio)), (destination,))

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        # What lies in the destination has to be read before it is overwritten.
        first, second, *more = sorted(sources, key=lambda array: _address(array) != _address(destination))
        self.apply(plus, (first, second), (destination,))
        for array in more:
            self.apply(plus, (destination, array), (destination,))

    # -- recurrent layers ---------------------------------------------------------------------------

    def lstm_step_forward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array,
        next_cont: Array | None = None, carried: Array | None = None,
    ) -> None:  # fmt: skip
        self.lstm_unit_forward(gates, cell_before, cont, cell, hidden)
        if next_cont is not None and carried is not None:
            self.apply(times, (hidden, next_cont), (carried,), axis=0)

    def lstm_step_backward(  # noqa: PLR0913 -- what a step reads and writes
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, dy: Array, d_gates: Array,
        next_cont: Array | None = None, d_carried: Array | None = None,
    ) -> None:  # fmt: skip
        d_hidden = dy
        if next_cont is not None and d_carried is not None:
            d_hidden = d_carried
            self.apply(times, (d_carried, next_cont), (d_hidden,), axis=0)
            self.add(dy, d_hidden)
        self.lstm_unit_backward(gates, cell_before, cont, cell, d_cell, d_hidden)
        if d_gates is not gates:
            self.copy(gates, d_gates)
