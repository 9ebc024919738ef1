"""InnerProduct, the fully connected layer."""

from __future__ import annotations

import math

from caffepy.backend import Array, Expression
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import identity, total_with_channel
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.core.unit_weights import UnitWeights


@register_layer("InnerProduct")
class InnerProductLayer(Layer):
    """y = x weights^T + bias, where x is (M, K): the axes before `axis` form M, the others K.

    Parameters: weights (num_output, K), or (K, num_output) with `transpose`; bias (num_output,) unless bias_term is
    false. Shapes: bottom (d0, ..., d_axis-1, ...), top (d0, ..., d_axis-1, num_output) (Caffe's
    `inner_product_layer.cpp`).

    With `normalize` the weights of each output are divided by their length, sqrt(sum of squares + 1e-12), before use;
    in TRAIN the parameter keeps the quotient (`inner_product_layer.cu` of caffe-windows; Wang et al. 2018).

    Raises:
        ConfigError: num_output is missing.
        ShapeError: K differs from the weights'.
    """

    supports_half = True
    recordable = True

    _bottom_shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.inner_product_param
        if param.num_output < 1:
            raise self.error("inner_product_param needs num_output")
        axis = bottom[0].axis(param.axis, self.where)
        self._inputs = math.prod(bottom[0].shape[axis:])
        shape = (param.num_output, self._inputs)
        self.add_parameter(shape[::-1] if param.transpose else shape, param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)
        self._unit_weights = UnitWeights(self, int(param.transpose)) if param.normalize else None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.inner_product_param
        shape = bottom[0].shape
        axis = bottom[0].axis(param.axis, self.where)
        if math.prod(shape[axis:]) != self._inputs:
            raise self.shape_error(
                f"the axes from {axis} on have {math.prod(shape[axis:])} elements, but the weights need {self._inputs}",
                bottom[0], self.blobs[0],
            )  # fmt: skip
        top[0].reshape((*shape[:axis], param.num_output))
        if shape == self._bottom_shape:
            return
        self._bottom_shape = shape
        rows = math.prod(shape[:axis])
        self._x = LayoutAdapter(self.backend, shape, (rows, self._inputs), self.dtype)
        self._dx = LayoutAdapter(self.backend, shape, (rows, self._inputs), self.dtype)
        self._y = LayoutAdapter(self.backend, top[0].shape, (rows, param.num_output), self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.compute(bottom[0], top[0], total_with_channel)

    def compute(self, bottom: Blob, top: Blob, with_bias: Expression) -> None:
        """Compute the top's data. `with_bias` is the formula of product and bias, with a fused activation."""
        param = self.param.inner_product_param
        x, y = self._x.load(bottom.data), self._y.target(top.data)
        weights = self.weights() if self._unit_weights is None else self._unit_weights.load()
        transpose = not param.transpose
        if param.bias_term:
            self.backend.gemm_and_apply(with_bias, x, weights, self.blobs[1].data, y, transpose_b=transpose)
        else:
            self.backend.gemm(x, weights, y, transpose_b=transpose)
        self._y.store(top.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        param = self.param.inner_product_param
        if param.bias_term and self.propagate_to_params[1]:
            dy = self._y.load(top[0].diff)
            self.backend.reduce(identity, (dy,), (self.blobs[1].diff,), accumulate=self.accumulate(1))
        self.propagate(bottom[0], top[0].diff, propagate_down[0])

    def propagate(self, bottom: Blob, top_diff: Array, down: bool) -> None:
        """Compute the gradients of the weights and, with `down`, of the bottom from `top_diff`."""
        param = self.param.inner_product_param
        dy = self._y.load(top_diff)
        if self.propagate_to_params[0]:
            x = self._x.target(bottom.data)
            a, b = (x, dy) if param.transpose else (dy, x)
            self.backend.gemm(a, b, self.blobs[0].diff, transpose_a=True, accumulate=self.accumulate(0))
        if down:
            dx = self._dx.target(bottom.diff)
            weights = self.weights() if self._unit_weights is None else self._unit_weights.loaded()
            self.backend.gemm(dy, weights, dx, transpose_b=param.transpose)
            self._dx.store(bottom.diff)
