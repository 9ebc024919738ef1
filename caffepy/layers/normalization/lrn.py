"""Local response normalisation (Krizhevsky, Sutskever and Hinton 2012; Caffe's `lrn_layer.cpp`)."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Each, Geometry, LrnWindow, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.core.formulas import product
from caffepy.proto import caffe_pb2

LARGEST_SIZE = 2**14
"""Largest local_size, which is far above that of real nets."""


@expression
def normalised(x: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    return x * (1 + alpha * average) ** (-beta)


@expression
def average_gradient(x: Each, dy: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    return -alpha * beta * dy * x * (1 + alpha * average) ** (-beta - 1)


@expression
def within_gradient(x: Each, dy: Each, average: Each, dsquare: Each, alpha: Scalar, beta: Scalar) -> Each:
    return dy * (1 + alpha * average) ** (-beta) + 2 * x * dsquare


@expression
def normalised_by_roots(x: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    root = sqrt(1 + alpha * average)
    return x / (root * sqrt(root))


@expression
def average_gradient_by_roots(x: Each, dy: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    base = 1 + alpha * average
    root = sqrt(base)
    return -alpha * beta * dy * x / (base * (root * sqrt(root)))


@expression
def within_gradient_by_roots(
    x: Each, dy: Each, average: Each, dsquare: Each, alpha: Scalar, beta: Scalar
) -> Each:  # fmt: skip
    root = sqrt(1 + alpha * average)
    return dy / (root * sqrt(root)) + 2 * x * dsquare


GENERAL = normalised, average_gradient, within_gradient
BY_ROOTS = normalised_by_roots, average_gradient_by_roots, within_gradient_by_roots
"""For beta = 0.75, the value of nearly all nets: two square roots are several times faster than a power."""


@register_layer("LRN")
class LRNLayer(Layer):
    """Normalises each value by the squares of its neighbours. x and y are (N, C, H, W), n is `local_size`.

    ACROSS_CHANNELS: y = x * (k + alpha / n * sum of x^2 over n neighbouring channels)^-beta.
    WITHIN_CHANNEL: y = x * (1 + alpha * average of x^2 over n x n neighbouring pixels)^-beta. As in Caffe, `k` is
    ignored there, and the average is that of a padded pooling layer.

    Raises:
        ConfigError: local_size is even or above 2^14.
        ShapeError: the bottom does not have four axes.
    """

    supports_half = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.lrn_param
        if param.local_size % 2 == 0:
            raise self.error(f"local_size is {param.local_size}, but must be odd")
        if param.local_size > LARGEST_SIZE:
            raise self.error(f"local_size is {param.local_size}; at most {LARGEST_SIZE} is possible")
        self._across = param.norm_region == caffe_pb2.LRNParameter.ACROSS_CHANNELS
        half = (param.local_size - 1) // 2
        self._formulas = BY_ROOTS if param.beta == 0.75 else GENERAL
        self._geometry = Geometry((param.local_size,) * 2, (1, 1), (half, half), (1, 1))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        top[0].reshape(shape)
        needs_scale = not self._across or self.backend.keeps_lrn_scale
        self._scale: ScratchBuffer | None = self.scratch("scale", shape) if needs_scale else None
        """The base of the power (across), or the average of squares (within)."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.lrn_param
        x, y = bottom[0].data, top[0].data
        scale = None if self._scale is None else self._scale.array
        if self._across:
            self.backend.lrn_across_forward(x, y, scale, self._window())
            if scale is not None:
                self.save_top(top)
            return
        squares = self.scratch("squares", x.shape).array
        self.backend.apply(product, (x, x), (squares,))
        self.backend.pool_average_forward(squares, scale, self._geometry)
        self.backend.apply(self._formulas[0], (x, scale, param.alpha, param.beta), (y,))

    def _window(self) -> LrnWindow:
        param = self.param.lrn_param
        return LrnWindow(param.local_size, param.alpha, param.beta, param.k)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        param = self.param.lrn_param
        x, dy, dx = bottom[0].data, top[0].diff, bottom[0].diff
        scale = None if self._scale is None else self._scale.array
        if self._across:
            y = None if scale is None else self.saved_top(top)
            self.backend.lrn_across_backward(x, y, scale, dy, dx, self._window())
            return
        # Pooling does not change the dtype, and these products may underflow in half precision.
        part = dx if bottom[0].dtype == "float32" else self.scratch("part", x.shape).array
        self.backend.apply(self._formulas[1], (x, dy, scale, param.alpha, param.beta), (part,))
        squares = self.scratch("squares", x.shape).array
        self.backend.pool_average_backward(part, squares, self._geometry)
        inputs = (x, dy, scale, squares, param.alpha, param.beta)
        self.backend.apply(self._formulas[2], inputs, (dx,))
