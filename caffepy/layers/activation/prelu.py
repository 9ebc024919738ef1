"""PReLU."""

from __future__ import annotations

from caffepy.backend import Array, Channel, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.proto import caffe_pb2


@expression
def prelu(x: Each, slope: Channel) -> Each:
    return x if x > 0 else slope * x


@expression
def prelu_gradient(x: Each, dy: Each, slope: Channel) -> Each:
    return dy if x > 0 else slope * dy


@expression
def prelu_slope_gradient(x: Each, dy: Each) -> Each:
    return 0.0 if x > 0 else x * dy


@register_layer("PReLU")
class PReLULayer(ActivationLayer):
    """y = max(x, 0) + slope_c * min(x, 0) with learned slopes (He, Zhang, Ren and Sun 2015).

    x is (N, C, ...). The parameter has shape (C,), or () with `channel_shared`. `filler` initialises it, by default to
    0.25. dslope = sum of x * dy where x <= 0 (Caffe's `prelu_layer.cpp`).

    Raises:
        ShapeError: the bottom has fewer than two axes, or C differs from the number of slopes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._check(bottom)
        param = self.param.prelu_param
        default = caffe_pb2.FillerParameter(type="constant", value=0.25)
        shape = () if param.channel_shared else (bottom[0].shape[1],)
        self.add_parameter(shape, param.filler if param.HasField("filler") else default)

    def _check(self, bottom: Blobs) -> None:
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, ...)", bottom[0])

    def reads_bottom(self) -> bool:
        return True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check(bottom)
        slopes = self.blobs[0]
        if slopes.shape not in ((), bottom[0].shape[1:2]):
            raise self.shape_error("the bottom needs one channel for each slope", bottom[0], slopes)
        super().reshape(bottom, top)

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(prelu, (x, self.blobs[0].data), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(prelu_gradient, (source, dy, self.blobs[0].data), (dx,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        # The slopes' gradient comes first: in place, the bottom's diff overwrites the top's.
        if self.propagate_to_params[0]:
            inputs = (self.source(top, bottom), top[0].diff)
            output = self.blobs[0].diff
            self.backend.reduce(prelu_slope_gradient, inputs, (output,), accumulate=self.accumulate(0))
        super().backward(top, propagate_down, bottom)
