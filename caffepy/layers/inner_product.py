"""InnerProduct, the fully connected layer; Embed, its form for indices; weights divided by their length."""

from __future__ import annotations

import math
from math import sqrt

from caffepy.backend import Array, Each, Expression, Scalar, expression
from caffepy.backend.formulas import identity, product_with_channel, squared, total_with_channel
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, register_layer
from caffepy.layers.loss import IndexCheck

LEAST_SQUARE = 1e-12
"""Added to the squared length, as caffe-windows does on GPUs."""


@expression
def inverse_length(square: Each, least: Scalar) -> Each:
    return 1 / sqrt(square + least)


class UnitWeights:
    """Parameter 0 of a layer with the weights of each output divided by their length.

    In TRAIN the parameter itself is divided, as in the forks: an update starts from weights of length 1. In TEST the
    parameter stays.

    Args:
        layer: has the parameter.
        axis: of the outputs in the parameter's shape.
    """

    def __init__(self, layer: Layer, axis: int = 0) -> None:
        self._layer = layer
        self._axis = axis
        self._training = layer.context.phase == caffe_pb2.TRAIN
        self._factors = layer.backend.zeros((layer.blobs[0].shape[axis],))

    def load(self) -> Array:
        """Divide the weights and return them in the dtype of the layer's blobs."""
        backend, data = self._layer.backend, self._layer.blobs[0].data
        backend.reduce(squared, (data,), (self._factors,), self._axis)
        backend.apply(inverse_length, (self._factors, LEAST_SQUARE), (self._factors,))
        target = data if self._training else self.loaded()
        backend.apply(product_with_channel, (data, self._factors), (target,), self._axis)
        if self._training and self.loaded() is not data:
            backend.copy(data, self.loaded())
        return self.loaded()

    def loaded(self) -> Array:
        """Return the weights of the last `load`."""
        if self._training:
            return self._layer.weights()
        return self._layer.scratch("unit weights", self._layer.blobs[0].shape, self._layer.dtype).array


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
    learns = True
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
                bottom[0],
                self.blobs[0],
            )
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


@register_layer("Embed")
class EmbedLayer(Layer):
    """y = table[x] + bias (Caffe's `embed_layer.cpp`).

    Shapes: x any, table (input_dim, num_output), bias (num_output,) unless `bias_term` is false, y (*x, num_output).
    Indices are rounded towards 0. The gradient of a row of the table is the sum of dy over its indices.

    Raises:
        ConfigError: num_output or input_dim is 0.
        DataError: an index is outside 0 to input_dim - 1.
    """

    learns = True
    recordable = True
    no_gradient_bottoms = frozenset({0})

    _shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.embed_param
        for name in ("num_output", "input_dim"):
            if getattr(param, name) < 1:
                raise self.error(f"embed_param.{name} must be at least 1")
        self.add_parameter((param.input_dim, param.num_output), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)
        self._check = IndexCheck(
            self,
            f"element {{}} of '{bottom[0].title}' is outside 0 to {param.input_dim - 1}; correct it, or give "
            "embed_param a larger input_dim",
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        width = self.param.embed_param.num_output
        top[0].reshape((*bottom[0].shape, width))
        shapes = (bottom[0].shape, top[0].shape)
        if shapes != self._shapes:
            self._shapes = shapes
            rows = (bottom[0].count, width)
            self._index = LayoutAdapter(self.backend, bottom[0].shape, rows[:1])
            self._y, self._dy = (LayoutAdapter(self.backend, top[0].shape, rows) for _ in range(2))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = self._y.target(top[0].data)
        index = self._index.load(bottom[0].data)
        self.backend.gather_rows(self.blobs[0].data, index, y, self._check.bad_index)
        if self.param.embed_param.bias_term:
            self.backend.apply(total_with_channel, (y, self.blobs[1].data), (y,))
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = self._dy.load(top[0].diff)
        if self.propagate_to_params[0]:
            if not self.accumulate(0):
                self.backend.fill(self.blobs[0].diff, 0)
            self.backend.scatter_add_rows(dy, self._index.load(bottom[0].data), self.blobs[0].diff)
        if self.param.embed_param.bias_term and self.propagate_to_params[1]:
            self.backend.reduce(identity, (dy,), (self.blobs[1].diff,), 1, self.accumulate(1))

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()
