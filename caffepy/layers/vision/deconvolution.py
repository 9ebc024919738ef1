"""Deconvolution."""

from __future__ import annotations

from caffepy.backend import Convolution
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import total_with_channel
from caffepy.layers.vision.base_convolution import BaseConvolutionLayer, Shape


@register_layer("Deconvolution")
class DeconvolutionLayer(BaseConvolutionLayer):
    """Transposed convolution: y is the data gradient of a convolution with output gradient x (`deconv_layer.cpp`).

    Shapes: x (N, C, H, W), weights (C, num_output / group, kernel_h, kernel_w), y (N, num_output, H', W'); with other
    numbers of axes accordingly. The output size along an axis is
    stride (size - 1) + dilation (kernel - 1) + 1 - 2 pad.
    """

    recordable = True

    def _weights_shape(self, channels: int) -> Shape:
        param = self.settings
        return (channels, param.num_output // param.group, *self._geometry.kernel)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        return g.stride[axis] * (size - 1) + g.dilation[axis] * (g.kernel[axis] - 1) + 1 - 2 * g.pad[axis]

    def _directed(self, bottom: Shape, top: Shape) -> tuple[Shape, Shape]:
        return top, bottom

    def _make_plan(self, bottom: Shape, top: Shape) -> Convolution:
        return self.backend.plan_convolution(top, self._filter_shape, self._planned_geometry, self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            out = self._y.target(y.data)
            self._plan.backward_data(self._x.load(x.data), self._filters(self.weights()), out)
            if self.settings.bias_term:
                self.backend.apply(total_with_channel, (out, self.blobs[1].data), (out,))
            self._y.store(y.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, needs_gradient in zip(bottom, top, propagate_down, strict=True):
            dy = self._y.load(y.diff)
            if self.propagate_to_params[0]:
                dweights = self._filters(self.blobs[0].diff)
                self._plan.backward_weights(dy, self._x.load(x.data), dweights, self.accumulate(0))
            if needs_gradient:
                self._plan.forward(dy, self._filters(self.weights()), None, self._dx.target(x.diff))
                self._dx.store(x.diff)
