"""Weights that are divided by their length before each use."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Layer
from caffepy.layers.core.formulas import product_with_channel
from caffepy.proto import caffe_pb2

LEAST_SQUARE = 1e-12
"""Added to the squared length, as caffe-windows does on GPUs."""


@expression
def squared(x: Each) -> Each:
    return x * x


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
