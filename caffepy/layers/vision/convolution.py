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
    """y = weights * x + bias, cross-correlation over windows (Caffe's `conv_layer.cpp`).

    Output size along an axis: (size + 2 pad - (dilation (kernel - 1) + 1)) / stride + 1, the quotient rounded towards
    0 as C++ does. So a kernel that reaches past the padded image by less than the stride has one window, whose
    elements past the image are 0.
    """

    recordable = True

    def _weights_shape(self, channels: int) -> Shape:
        param = self.param.convolution_param
        return (param.num_output, channels // param.group, *self._geometry.kernel)

    def _span(self, size: int, axis: int) -> int:
        """How far the first window can be moved; negative where it reaches past the padded image."""
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
        """The convolution of the present shapes."""
        return self._plan

    @property
    def bias(self) -> Array | None:
        """The bias, if there is one."""
        return self.blobs[1].data if self.param.convolution_param.bias_term else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            self.compute(x, y)

    def compute(self, x: Blob, y: Blob, relu: bool = False, sums: Array | None = None) -> None:
        """The top's data, perhaps rectified, and their sums as `Convolution.forward` gives them."""
        weights, out = self._filters(self.weights()), self._y.target(y.data)
        self._plan.forward(self._x.load(x.data), weights, self.bias, out, relu=relu, sums=sums)
        self._y.store(y.data)

    def convolve(
        self, x: Blob, y: Blob, weights: Array | None, bias: Array | None, residual: Array | None, relu: bool
    ) -> None:
        """The top's data with other weights (None: the layer's own) and bias, a residual added, perhaps rectified."""
        filters = self._filters(self.weights() if weights is None else weights)
        image, out = self._x.load(x.data), self._y.target(y.data)
        if residual is None:
            self._plan.forward(image, filters, bias, out, relu=relu)
        else:
            self.backend.convolve_and_add(self._plan, image, filters, bias, residual, out, relu)
        self._y.store(y.data)

    def keep_weights(self, weights: Array, given: Array | None = None) -> bool:
        """Let `convolve` with the weights `given` (None: with these) rely on the present values of these.

        Returns:
            Whether it does, until this is called again or a bottom of another shape brings another plan.
        """
        if self._plan_shape is None:
            return False
        stand_in = None if given is None else self._filters(given)
        return self.backend.keep_weights(self._plan, self._filters(weights), stand_in)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            self.propagate(x, y.diff, wanted)

    @property
    def gradients(self) -> NormalisedGradients | None:
        """What computes the gradients of weights and bottom in one pass, if both are wanted and it can."""
        return self._plan.backward_normalised if self._x.is_same and self.propagate_to_params[0] else None

    def compute_normalised(
        self, forward: NormalisedForward, bottom: NormalisedBottom, y: Blob, sums: Array | None
    ) -> None:
        """The top's data by `forward`, and their sums."""
        forward(bottom, self._filters(self.weights()), self._y.target(y.data), sums)
        self._y.store(y.data)

    def propagate_normalised(
        self, gradients: NormalisedGradients, bottom: NormalisedBottom, dy: Array, dx: Array
    ) -> None:
        """`gradients` of the weights and the bottom, and what the normalisation that the bottom comes from needs."""
        filters, dweights = self._filters(self.weights()), self._filters(self.blobs[0].diff)
        gradients(bottom, self._y.load(dy), filters, dx, dweights, self.accumulate(0))

    def propagate(self, x: Blob, dy: Array, down: bool) -> None:
        """The gradients of the weights and, if `down`, of the bottom, given that of the top."""
        dy = self._y.load(dy)
        if self.propagate_to_params[0]:
            dweights = self._filters(self.blobs[0].diff)
            self._plan.backward_weights(self._x.load(x.data), dy, dweights, self.accumulate(0))
        if down:
            self._plan.backward_data(dy, self._filters(self.weights()), self._dx.target(x.diff))
            self._dx.store(x.diff)
