"""Scale and Bias: factors and terms for some of the axes, learned or from a second bottom."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Channel, Each, Expression, expression
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.core.formulas import (
    identity,
    product,
    product_plus,
    product_with_channel,
    total,
    total_with_channel,
)
from caffepy.proto import caffe_pb2


class BroadcastLayer(Layer):
    """A layer that combines its bottom with an operand which has some of the bottom's axes, from `axis` on.

    The operand is the second bottom, or parameter 0 with the bottom's `num_axes` axes (-1: all from `axis` on).
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    bottoms = (1, 2)
    _axis = 0

    @property
    def axis(self) -> int:
        """The first axis that the operand stands for."""
        return self._axis

    def add_operand(self, shape: tuple[int, ...], axis: int, num_axes: int, filler: caffe_pb2.FillerParameter) -> None:
        """Make the next parameter, for `num_axes` axes of a bottom of this shape."""
        end = len(shape) if num_axes == -1 else axis + num_axes
        if num_axes < -1 or end > len(shape):
            raise self.error(f"num_axes {num_axes} from axis {axis} on goes past the bottom's {len(shape)} axes")
        self.add_parameter(shape[axis:end], filler)

    def operand(self, bottom: Blobs) -> Blob:
        """The blob that the bottom is combined with."""
        return bottom[1] if len(bottom) > 1 else self.blobs[0]

    def place_operand(self, operand: Blob, bottom: Blobs, axis: int) -> None:
        """Find the axes that the operand stands for, and check them.

        Raises:
            ShapeError: they have other sizes.
        """
        shape = bottom[0].shape
        self._axis = bottom[0].axis(axis, self.where) if operand.shape else 0
        fitting = shape[self._axis : self._axis + len(operand.shape)]
        if operand.shape != fitting:
            raise self.shape_error(
                f"'{operand.name}' must have the shape of the bottom's axes from {self._axis} on", bottom[0], operand
            )
        self._whole = operand.shape == shape
        """Whether the operand has all of the bottom's axes."""

    def combine(self, by_channel: Expression, by_element: Expression, inputs: Sequence[Array], output: Array) -> None:
        """output = formula(inputs), where all inputs but the first have the operand's axes."""
        self.backend.apply(by_element if self._whole else by_channel, inputs, (output,), self._axis)

    def put_sum(self, terms: tuple[Array, ...], output: Array, accumulate: bool) -> None:
        """output (+)= the sum, over the axes that the operand has not, of the product of one or two terms."""
        formula = product if len(terms) == 2 else identity
        if not self._whole:
            self.backend.reduce(formula, terms, (output,), self._axis, accumulate)
        elif not accumulate:
            self.backend.apply(formula, terms, (output,))
        else:
            self.backend.apply(product_plus if len(terms) == 2 else total, (*terms, output), (output,))

    def put_operand_gradient(self, terms: tuple[Array, ...], propagate_down: list[bool], bottom: Blobs) -> None:
        """The operand's gradient, where it is wanted."""
        if len(bottom) > 1:
            if propagate_down[1]:
                self.put_sum(terms, bottom[1].diff, False)
        elif self.propagate_to_params[0]:
            self.put_sum(terms, self.blobs[0].diff, self.accumulate(0))


@register_layer("Bias")
class BiasLayer(BroadcastLayer):
    """y = x + bias (Caffe's `bias_layer.cpp`). The parameter starts at 0."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bias_param
        if len(bottom) == 1:
            axis = bottom[0].axis(param.axis, self.where)
            self.add_operand(bottom[0].shape, axis, param.num_axes, param.filler)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.place_operand(self.operand(bottom), bottom, self.param.bias_param.axis)
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.combine(total_with_channel, total, (bottom[0].data, self.operand(bottom).data), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.put_operand_gradient((top[0].diff,), propagate_down, bottom)
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
    """y = x * scale, + bias if `bias_term` (Caffe's `scale_layer.cpp`).

    Parameters: the scale, starting at 1, unless it is the second bottom; then the bias, of the scale's shape, starting
    at 0. In place, the bottom's data are kept for the scale's gradient.
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
        for operand in (*self.blobs[-1:], self.operand(bottom)):  # the bias, which has a parameter's shape of its own
            self.place_operand(operand, bottom, self.param.scale_param.axis)
        top[0].reshape(bottom[0].shape)
        self._saved_bottom = self.scratch("kept", bottom[0].shape, self.dtype) if bottom[0] is top[0] else None

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
        if not self._both_at_once(x, dy, bottom):
            index = len(self.blobs) - 1
            if self.param.scale_param.bias_term and self.propagate_to_params[index]:
                self.put_sum((dy,), self.blobs[index].diff, self.accumulate(index))
            self.put_operand_gradient((x, dy), propagate_down, bottom)
        if propagate_down[0]:
            self.combine(product_with_channel, product, (dy, self.operand(bottom).data), bottom[0].diff)

    def _both_at_once(self, x: Array, dy: Array, bottom: Blobs) -> bool:
        """The gradients of both parameters in one pass, in the common case; whether that was it."""
        if len(self.blobs) < 2 or self._whole or not all(self.propagate_to_params):
            return False
        scale, bias = self.blobs
        if scale.gradient_started != bias.gradient_started or scale.gradient_owner is bias.gradient_owner:
            return False
        accumulate = self.accumulate(0) and self.accumulate(1)
        bias.gradient_started = True
        self.backend.reduce(gradients, (x, dy), (scale.diff, bias.diff), self._axis, accumulate)
        return True
