"""Products and sums with broadcasting: Scale, Bias, Eltwise, and Axpy of SENet."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Channel, Each, Expression, Scalar, expression
from caffepy.backend.formulas import (
    identity,
    product,
    product_plus,
    product_with_channel,
    scaled,
    total,
    total_with_channel,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, ScratchBuffer, register_layer


class BroadcastLayer(Layer):
    """A layer that broadcasts an operand over its bottom: the operand has some of the bottom's axes, from `axis` on.

    The operand is the second bottom, or parameter 0 with the shape of `num_axes` axes of the bottom (-1: all axes from
    `axis` on).
    """

    supports_half = True
    recordable = True
    keeps_labels = True
    float32_bottoms = frozenset({1})  # as parameter 0 is, which it stands for

    bottoms = (1, 2)
    _axis = 0

    @property
    def axis(self) -> int:
        """The bottom's axis that corresponds to axis 0 of the operand."""
        return self._axis

    def add_operand(self, shape: tuple[int, ...], axis: int, num_axes: int, filler: caffe_pb2.FillerParameter) -> None:
        """Make the next parameter, with the shape of `num_axes` axes of a bottom of this shape."""
        end = len(shape) if num_axes == -1 else axis + num_axes
        if num_axes < -1 or end > len(shape):
            raise self.error(f"num_axes {num_axes} from axis {axis} on goes past the bottom's {len(shape)} axes")
        self.add_parameter(shape[axis:end], filler)

    def operand(self, bottom: Blobs) -> Blob:
        """Return the second bottom, or parameter 0."""
        return bottom[1] if len(bottom) > 1 else self.blobs[0]

    def align_operand(self, operand: Blob, bottom: Blobs, axis: int) -> None:
        """Align the operand with the bottom's axes from `axis` on.

        Raises:
            ShapeError: the sizes of the axes differ.
        """
        shape = bottom[0].shape
        self._axis = bottom[0].axis(axis, self.where) if operand.shape else 0
        if operand.shape != shape[self._axis : self._axis + len(operand.shape)]:
            raise self.shape_error(
                f"'{operand.name}' must have the shape of the bottom's axes from {self._axis} on", bottom[0], operand
            )
        self._same_shape = operand.shape == shape
        """Whether the operand has all of the bottom's axes."""

    def combine(self, by_channel: Expression, by_element: Expression, inputs: Sequence[Array], output: Array) -> None:
        """output = formula(inputs), where the first input has the bottom's axes and the others the operand's."""
        self.backend.apply(by_element if self._same_shape else by_channel, inputs, (output,), self._axis)

    def reduce_product(self, terms: tuple[Array, ...], output: Array, accumulate: bool) -> None:
        """output (+)= the product of one or two terms, summed over the axes that the operand lacks."""
        formula = product if len(terms) == 2 else identity
        if not self._same_shape:
            self.backend.reduce(formula, terms, (output,), self._axis, accumulate)
        elif not accumulate:
            self.backend.apply(formula, terms, (output,))
        else:
            self.backend.apply(product_plus if len(terms) == 2 else total, (*terms, output), (output,))

    def compute_operand_gradient(self, terms: tuple[Array, ...], propagate_down: list[bool], bottom: Blobs) -> None:
        """Compute the operand's gradient, the reduced product of `terms`, if it is needed."""
        if len(bottom) > 1:
            if propagate_down[1]:
                self.reduce_product(terms, bottom[1].diff, False)
        elif self.propagate_to_params[0]:
            self.reduce_product(terms, self.blobs[0].diff, self.accumulate(0))


@register_layer("Bias")
class BiasLayer(BroadcastLayer):
    """y = x + bias (Caffe's `bias_layer.cpp`).

    The bias is the second bottom, or a parameter with the shape of `num_axes` axes of x from `axis` on, initially 0.

    Raises:
        ConfigError: num_axes goes past the bottom's axes.
        ShapeError: the bias does not have the shape of the bottom's axes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bias_param
        if len(bottom) == 1:
            axis = bottom[0].axis(param.axis, self.where)
            self.add_operand(bottom[0].shape, axis, param.num_axes, param.filler)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.align_operand(self.operand(bottom), bottom, self.param.bias_param.axis)
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.combine(total_with_channel, total, (bottom[0].data, self.operand(bottom).data), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.compute_operand_gradient((top[0].diff,), propagate_down, bottom)
        if propagate_down[0] and bottom[0] is not top[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


@expression
def scale_shift(x: Each, scale: Channel, bias: Channel) -> Each:
    return x * scale + bias


@expression
def gradients(x: Each, dy: Each) -> tuple[Each, Each]:
    return x * dy, dy


@register_layer("Scale")
class ScaleLayer(BroadcastLayer):
    """y = x * scale, + bias with `bias_term` (Caffe's `scale_layer.cpp`).

    Parameters: the scale, initially 1, with the shape of `num_axes` axes of x from `axis` on, unless it is the second
    bottom; with `bias_term` the bias, of the scale's shape, initially 0. In place, the layer saves the bottom's data
    for the scale's gradient.

    Raises:
        ConfigError: num_axes goes past the bottom's axes.
        ShapeError: the scale does not have the shape of the bottom's axes.
    """

    _saved_bottom: ScratchBuffer | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.scale_param
        axis = bottom[0].axis(param.axis, self.where)
        one = caffe_pb2.FillerParameter(value=1)
        if len(bottom) == 1:
            filler = param.filler if param.HasField("filler") else one
            self.add_operand(bottom[0].shape, axis, param.num_axes, filler)
        if param.bias_term:
            num_axes = len(bottom[1].shape) if len(bottom) > 1 else param.num_axes
            self.add_operand(bottom[0].shape, axis if num_axes else 0, num_axes, param.bias_filler)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for operand in (*self.blobs[-1:], self.operand(bottom)):  # the bias, and the scale
            self.align_operand(operand, bottom, self.param.scale_param.axis)
        top[0].reshape(bottom[0].shape)
        self._saved_bottom = self.scratch("saved bottom", bottom[0].shape, self.dtype) if bottom[0] is top[0] else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y, scale = bottom[0].data, top[0].data, self.operand(bottom).data
        if self._saved_bottom is not None and not self.context.forward_only:
            self.backend.copy(x, self._saved_bottom.array)
        if self.param.scale_param.bias_term:
            self.combine(scale_shift, product_plus, (x, scale, self.blobs[-1].data), y)
        else:
            self.combine(product_with_channel, product, (x, scale), y)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        x = bottom[0].data if self._saved_bottom is None else self._saved_bottom.array
        dy = top[0].diff
        if not self._fused_parameter_gradients(x, dy):
            index = len(self.blobs) - 1
            if self.param.scale_param.bias_term and self.propagate_to_params[index]:
                self.reduce_product((dy,), self.blobs[index].diff, self.accumulate(index))
            self.compute_operand_gradient((x, dy), propagate_down, bottom)
        if propagate_down[0]:
            self.combine(product_with_channel, product, (dy, self.operand(bottom).data), bottom[0].diff)

    def _fused_parameter_gradients(self, x: Array, dy: Array) -> bool:
        """Compute the gradients of scale and bias in one pass over the data, if that is possible; return whether."""
        if len(self.blobs) < 2 or self._same_shape or not all(self.propagate_to_params):
            return False
        scale, bias = self.blobs
        if scale.gradient_started != bias.gradient_started or scale.gradient_owner is bias.gradient_owner:
            return False
        accumulate = self.accumulate(0) and self.accumulate(1)
        bias.gradient_started = True
        self.backend.reduce(gradients, (x, dy), (scale.diff, bias.diff), self._axis, accumulate)
        return True


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


@expression
def scaled_sum(x: Each, b: Each, a: Channel) -> Each:
    return a * x + b


@register_layer("Axpy")
class AxpyLayer(Layer):
    """y = a * x + b with one factor for each channel of each image (Hu et al. 2018; NVIDIA's `axpy_layer.cpp`).

    Shapes: a (N, C) or (N, C, 1, 1), x and b (N, C, …). da = sum of x * dy over positions, dx = a * dy, db = dy.

    Raises:
        ConfigError: the top is the first or the second bottom.
        ShapeError: the bottoms' shapes do not match.
    """

    supports_half = True
    recordable = True
    bottoms = (3, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if top[0] is bottom[0]:
            raise self.error(f"cannot work in place on its first bottom, '{bottom[0].title}'")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        a, x, b = bottom
        if len(x.shape) < 2 or a.shape[:2] != x.shape[:2] or a.count != x.shape[0] * x.shape[1]:
            raise self.shape_error("the first bottom must have one factor for each channel of the second", a, x)
        if x.shape != b.shape:
            raise self.shape_error("the second and the third bottom must have one shape", x, b)
        if top[0] is x:
            raise self.error(f"cannot work in place on its second bottom, '{x.name}', which its gradient needs")
        top[0].reshape(x.shape)

    def factors(self, a: Array) -> Array:
        """Return the factors as (N, C) in float32."""
        rows = self.backend.flat(a).reshape(a.shape[:2])
        if self.dtype == "float32":
            return rows
        factors = self.scratch("factors", a.shape[:2]).array
        self.backend.copy(rows, factors)
        return factors

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, x, b = (blob.data for blob in bottom)
        self.backend.apply(scaled_sum, (x, b, self.factors(a)), (top[0].data,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, x, b = bottom
        if propagate_down[0]:
            sums = self.scratch("sums", a.shape[:2]).array
            self.backend.reduce(product, (x.data, top[0].diff), (sums,), 0)
            self.backend.copy(sums, self.backend.flat(a.diff).reshape(a.shape[:2]))
        if propagate_down[1]:
            self.backend.apply(product_with_channel, (top[0].diff, self.factors(a.data)), (x.diff,), 0)
        if propagate_down[2] and b is not top[0]:
            self.backend.copy(top[0].diff, b.diff)
