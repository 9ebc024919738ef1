"""Scale and Bias: broadcast factors and terms, learned or from a second bottom."""

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
    """A layer that broadcasts an operand over its bottom: the operand has some of the bottom's axes, from `axis` on.

    The operand is the second bottom, or parameter 0 with the shape of `num_axes` axes of the bottom (-1: all axes from
    `axis` on).
    """

    supports_half = True
    recordable = True
    keeps_labels = True

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
