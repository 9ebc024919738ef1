"""Convolution."""

from __future__ import annotations

from caffepy.backend import Array, Convolution
from caffepy.backend.handles import NormalisedForward, NormalisedGradients
from caffepy.backend.types import NormalisedBottom
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.vision.base_convolution import BaseConvolutionLayer, Shape


@register_layer("Convolution")
class ConvolutionLayer(BaseConvolutionLayer):
    """y = cross-correlation of x and the weights, + bias (Caffe's `conv_layer.cpp`).

    Shapes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w), bias (num_output,),
    y (N, num_output, H', W'); with other numbers of axes accordingly. The output size along an axis is
    (size + 2 pad - (dilation (kernel - 1) + 1)) / stride + 1. The quotient is rounded towards 0 as in C++: a kernel
    that exceeds the padded image by less than the stride has one window, with zeros beyond the image.
    """

    recordable = True

    def _weights_shape(self, channels: int) -> Shape:
        param = self.settings
        return (param.num_output, channels // param.group, *self._geometry.kernel)

    def _span(self, size: int, axis: int) -> int:
        """Return the padded size less the window's; negative if the window exceeds the padded image."""
        g = self._geometry
        return size + 2 * g.pad[axis] - (g.dilation[axis] * (g.kernel[axis] - 1) + 1)

    def _output_size(self, size: int, axis: int) -> int:
        span, stride = self._span(size, axis), self._geometry.stride[axis]
        return (span // stride if span >= 0 else -(-span // stride)) + 1

    def _needed_size(self, size: int, axis: int) -> int:
        return size + max(0, -self._span(size, axis)) if self._geometry.kernel else size

    def _make_plan(self, bottom: Shape, top: Shape) -> Convolution:
        return self.backend.plan_convolution(bottom, self._filter_shape, self._planned_geometry, self.dtype)

    @property
    def plan(self) -> Convolution:
        """The plan for the current shapes."""
        return self._plan

    @property
    def bias(self) -> Array | None:
        """The bias, or None."""
        return self.blobs[1].data if self.settings.bias_term else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            self.compute(x, y)

    def compute(self, x: Blob, y: Blob, relu: bool = False, sums: Array | None = None) -> None:
        """Compute the top's data with an optional fused ReLU, and the channel sums of `Convolution.forward`."""
        weights, out = self._filters(self.weights()), self._y.target(y.data)
        self._plan.forward(self._x.load(x.data), weights, self.bias, out, relu=relu, sums=sums)
        self._y.store(y.data)

    def convolve(
        self, x: Blob, y: Blob, weights: Array | None, bias: Array | None, residual: Array | None, relu: bool
    ) -> None:
        """Compute the top's data with folded weights and bias, residual sum and ReLU (weights None: the layer's)."""
        filters = self._filters(self.weights() if weights is None else weights)
        image, out = self._x.load(x.data), self._y.target(y.data)
        if residual is None:
            self._plan.forward(image, filters, bias, out, relu=relu)
        else:
            self.backend.convolve_and_add(self._plan, image, filters, bias, residual, out, relu)
        self._y.store(y.data)

    def keep_weights(self, weights: Array, given: Array | None = None) -> bool:
        """Let the plan cache transformed `weights`, which must not change; `convolve` receives `given` in their place.

        Args:
            weights: the weights to transform.
            given: the array that `convolve` will receive; None: `weights`.

        Returns:
            Whether the plan caches them. A bottom of another shape makes a new plan without the cache.
        """
        if self._plan_shape is None:
            return False
        stand_in = None if given is None else self._filters(given)
        return self.backend.keep_weights(self._plan, self._filters(weights), stand_in)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, down in zip(bottom, top, propagate_down, strict=True):
            self.propagate(x, y.diff, down)

    @property
    def gradients(self) -> NormalisedGradients | None:
        """The plan's fused computation of the gradients of weights and bottom, or None."""
        return self._plan.backward_normalised if self._x.is_same and self.propagate_to_params[0] else None

    def compute_normalised(
        self, forward: NormalisedForward, bottom: NormalisedBottom, y: Blob, sums: Array | None
    ) -> None:
        """Compute the top's data and channel sums by `forward`, which normalises the bottom as it reads it."""
        forward(bottom, self._filters(self.weights()), self._y.target(y.data), sums)
        self._y.store(y.data)

    def propagate_normalised(
        self, gradients: NormalisedGradients, bottom: NormalisedBottom, dy: Array, dx: Array
    ) -> None:
        """Compute the gradients of the weights, of the bottom and of the bottom's normalisation by `gradients`."""
        filters, dweights = self._filters(self.weights()), self._filters(self.blobs[0].diff)
        gradients(bottom, self._y.load(dy), filters, dx, dweights, self.accumulate(0))

    def propagate(self, x: Blob, dy: Array, down: bool) -> None:
        """Compute the gradients of the weights and, with `down`, of the bottom from the top's diff `dy`."""
        dy = self._y.load(dy)
        if self.propagate_to_params[0]:
            dweights = self._filters(self.blobs[0].diff)
            self._plan.backward_weights(self._x.load(x.data), dy, dweights, self.accumulate(0))
        if down:
            self._plan.backward_data(dy, self._filters(self.weights()), self._dx.target(x.diff))
            self._dx.store(x.diff)
