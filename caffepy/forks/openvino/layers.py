"""GRN divides channels by their length. ScaleFilter multiplies them by random factors."""

from __future__ import annotations

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.formulas import product_with_channel
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.normalization import FLT_MIN, NormalizeLayer


@register_layer("GRN")
class GRNLayer(NormalizeLayer):
    """y = x / sqrt(sum of x^2 over channels + bias) (`grn_layer.cpp` of OpenVINO's training toolbox).

    Shapes: x and y are (N, C), (N, C, H) or (N, C, H, W). dx = (dy - y * sum of y * dy) / norm, or dy with
    `dummy_backward`. A bias of 0 counts as 1.2e-38, so that a pixel of zeros gives zeros.

    Raises:
        ConfigError: bias is below 0.
        ShapeError: the bottom has fewer than two or more than four axes.
    """

    tops = (1, 1)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        bias = self.param.grn_param.bias
        if not bias >= 0:
            raise self.error(f"grn_param.bias is {bias:g}; it must be at least 0")
        self._check_axes(bottom)
        self.eps = max(bias, FLT_MIN)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not self.param.grn_param.dummy_backward:
            super().backward(top, propagate_down, bottom)
        elif propagate_down[0] and top[0] is not bottom[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


@expression
def between(chance: Each, low: Scalar, high: Scalar) -> Each:
    return low + (high - low) * chance


@register_layer("ScaleFilter")
class ScaleFilterLayer(Layer):
    """y = s * x in TRAIN, with a random s for each channel of each image, and y = x in TEST.

    Shapes: x and y are (N, C, ...). s is uniform between min_scale and max_scale (`scale_filter_layer.cpp` of
    OpenVINO's training toolbox). dx = s * dy. The factors depend on the seed, the layer's name, the pass and the global
    number of the sample.

    Raises:
        ConfigError: min_scale is not above 0, or max_scale not above min_scale.
        ShapeError: the bottom has fewer than two axes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.scale_filter_param
        if not 0 < param.min_scale < param.max_scale < float("inf"):
            raise self.error(
                f"min_scale is {param.min_scale:g} and max_scale {param.max_scale:g}; min_scale must be above 0, and "
                "max_scale above min_scale"
            )
        self._training = self.context.phase == caffe_pb2.TRAIN

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2:
            raise self.shape_error("the bottom needs images and channels, (N, C, ...)", bottom[0])
        top[0].reshape(shape)
        if self._training:
            self._factors = self.backend.zeros(shape[:2])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._training:
            param, factors = self.param.scale_filter_param, self._factors
            self.backend.random_uniform(factors, self.random_stream(), self.counter())
            self.backend.apply(between, (factors, param.min_scale, param.max_scale), (factors,))
            self.backend.apply(product_with_channel, (bottom[0].data, factors), (top[0].data,), 0)
        elif top[0] is not bottom[0]:
            self.backend.copy(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self._training:
            self.backend.apply(product_with_channel, (top[0].diff, self._factors), (bottom[0].diff,), 0)
        elif top[0] is not bottom[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)
