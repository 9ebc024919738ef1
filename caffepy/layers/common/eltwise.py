"""Eltwise: the elementwise sum, product or maximum of several blobs (Caffe's `eltwise_layer.cpp`)."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.core.formulas import product, scaled
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.EltwiseParameter


@expression
def weighted_sum(a: Each, b: Each, weight_a: Scalar, weight_b: Scalar) -> Each:
    return weight_a * a + weight_b * b


@expression
def larger(a: Each, b: Each) -> tuple[Each, Each]:
    return (a if a != a else (a if a > b else b)), (0.0 if a != a else (0.0 if a > b else 1.0))


@expression
def larger_next(y: Each, winner: Each, b: Each, number: Scalar) -> tuple[Each, Each]:
    return (b if b != b else (b if b > y else y)), (number if b != b else (number if b > y else winner))


@expression
def maximum_gradient(dy: Each, winner: Each, number: Scalar) -> Each:
    return dy if winner == number else 0.0


@expression
def unstable_product_gradient(x: Each, y: Each, dy: Each) -> Each:
    return y / x * dy


@register_layer("Eltwise")
class EltwiseLayer(Layer):
    """SUM: y = sum of coeff_i * x_i. PROD: y = product of x_i. MAX: y = max x_i. All blobs have one shape.

    SUM accepts one bottom, as in FlowNet 2's Caffe. MAX passes the gradient to the bottom with the maximum. Of equal
    bottoms the first one gets it, but of bottoms 0 and 1 the second. PROD's gradient is dy times the product of the
    other bottoms, or dy * y / x_i without `stable_prod_grad`.

    The top may be the first bottom (in place). The results are then those of the layer with a separate top. (NVIDIA
    Caffe adds in place with `eltwise_mem_sharing`. In place, BVLC Caffe's SUM and MAX overwrite the bottom before they
    read it, and the gradients of PROD and MAX are wrong in both Caffes.)

    Raises:
        ConfigError: `coeff` does not have one entry for each bottom, or the operation is not SUM.
        ShapeError: the bottoms' shapes differ.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    bottoms = (1, None)
    _winner: ScratchBuffer

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom[1:], top)
        self._in_place = top[0] is bottom[0]
        param = self.param.eltwise_param
        if len(bottom) < 2 and param.operation != _Parameter.SUM:
            raise self.error("needs two bottoms; with one bottom the operation must be SUM")
        if param.coeff and param.operation != _Parameter.SUM:
            raise self.error("coeff is for operation: SUM only")
        if len(param.coeff) not in (0, len(bottom)):
            raise self.error(
                f"coeff is given {len(param.coeff)} times, but must be once for each of {len(bottom)} bottoms"
            )
        self._coefficients = list(param.coeff) or [1.0] * len(bottom)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for other in bottom[1:]:
            if other.shape != bottom[0].shape:
                raise self.shape_error("all bottoms must have one shape", bottom[0], other)
        top[0].reshape(bottom[0].shape)
        if self.param.eltwise_param.operation == _Parameter.MAX:
            self._winner = self.scratch("winner", bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        operation = self.param.eltwise_param.operation
        xs, y = [blob.data for blob in bottom], top[0].data
        if operation == _Parameter.SUM:
            self._sum(xs, y)
        elif operation == _Parameter.PROD:
            self._save_first(bottom)
            self._product(xs, y)
            if not self.param.eltwise_param.stable_prod_grad:
                self.save_top(top)
        else:
            self._maximum(xs, y)

    def _save_first(self, bottom: Blobs) -> None:
        """Copy the first bottom for the gradient if the top overwrites it."""
        if self._in_place:
            self.backend.copy(bottom[0].data, self.scratch("first", bottom[0].shape, self.dtype).array)

    def _saved_inputs(self, bottom: Blobs) -> list[Array]:
        """Return the bottoms' data before `forward`."""
        xs = [blob.data for blob in bottom]
        if self._in_place:
            xs[0] = self.scratch("first", bottom[0].shape, self.dtype).array
        return xs

    def _sum(self, xs: list[Array], y: Array) -> None:
        if len(xs) == 1:
            self.backend.apply(scaled, (xs[0], self._coefficients[0]), (y,))
            return
        first, second, *more = self._coefficients
        self.backend.apply(weighted_sum, (xs[0], xs[1], first, second), (y,))
        for x, coefficient in zip(xs[2:], more, strict=True):
            self.backend.apply(weighted_sum, (y, x, 1.0, coefficient), (y,))

    def _product(self, xs: list[Array], y: Array) -> None:
        self.backend.apply(product, (xs[0], xs[1]), (y,))
        for x in xs[2:]:
            self.backend.apply(product, (y, x), (y,))

    def _maximum(self, xs: list[Array], y: Array) -> None:
        winner = self._winner.array
        self.backend.apply(larger, (xs[0], xs[1]), (y, winner))
        for number, x in enumerate(xs[2:], start=2):
            self.backend.apply(larger_next, (y, winner, x, float(number)), (y, winner))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for number, needs_gradient in reversed(list(enumerate(propagate_down))):  # bottom 0 last: it may be the top
            if needs_gradient:
                self._differentiate(number, top, bottom)

    def _differentiate(self, number: int, top: Blobs, bottom: Blobs) -> None:
        param = self.param.eltwise_param
        dy, dx = top[0].diff, bottom[number].diff
        if param.operation == _Parameter.MAX:
            self.backend.apply(maximum_gradient, (dy, self._winner.array, float(number)), (dx,))
        elif param.operation == _Parameter.PROD and param.stable_prod_grad:
            others = [x for i, x in enumerate(self._saved_inputs(bottom)) if i != number]
            self._product([dy, *others], dx)
        elif param.operation == _Parameter.PROD:
            x = self._saved_inputs(bottom)[number]
            self.backend.apply(unstable_product_gradient, (x, self.saved_top(top), dy), (dx,))
        elif self._coefficients[number] != 1:
            self.backend.apply(scaled, (dy, self._coefficients[number]), (dx,))
        elif bottom[number] is not top[0]:
            self.backend.copy(dy, dx)
