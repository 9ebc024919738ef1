"""Batch normalisation (Ioffe and Szegedy 2015), with the statistics that Caffe keeps."""

from __future__ import annotations

import math
from math import sqrt

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.base import Blobs, Layer, register_layer
from caffepy.layers.formulas import scaled
from caffepy.proto import caffe_pb2

STATISTICS = 3
"""Blobs 0 to 2 are running sums, not learned."""


@expression
def squared_distance(x: Each, mean: Channel, factor: Scalar) -> Each:
    return (x - mean) * (x - mean) * factor


@expression
def running_sums(
    old_mean: Each, old_variance: Each, mean: Each, variance: Each, fraction: Scalar, correction: Scalar
) -> tuple[Each, Each]:
    return old_mean * fraction + mean, old_variance * fraction + variance * correction


@expression
def running_count(count: Each, fraction: Scalar) -> Each:
    return count * fraction + 1


@expression
def inverse_deviation(variance: Each, epsilon: Scalar) -> Each:
    return 1 / sqrt(variance + epsilon)


@expression
def stored_statistics(mean_sum: Each, variance_sum: Each, count: Channel, epsilon: Scalar) -> tuple[Each, Each]:
    factor = 0.0 if count == 0 else 1 / count
    return mean_sum * factor, 1 / sqrt(variance_sum * factor + epsilon)


@expression
def normalise(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> Each:
    return (x - mean) * inverse * scale + bias


@expression
def normalise_keeping(x: Each, mean: Channel, inverse: Channel, scale: Channel, bias: Channel) -> tuple[Each, Each]:
    return x, (x - mean) * inverse * scale + bias


@expression
def gradient_sums(x: Each, dy: Each, mean: Channel, inverse: Channel) -> tuple[Each, Each]:
    return dy * ((x - mean) * inverse), dy


@expression
def input_gradient(
    x: Each, dy: Each, mean: Channel, inverse: Channel, scale: Channel,
    sum_dy_x: Channel, sum_dy: Channel, per_element: Scalar,
) -> Each:  # fmt: skip
    normal = (x - mean) * inverse
    return (dy - (sum_dy + sum_dy_x * normal) * per_element) * inverse * scale


@expression
def stored_input_gradient(dy: Each, inverse: Channel, scale: Channel) -> Each:
    return dy * inverse * scale


@register_layer("BatchNorm")
class BatchNormLayer(Layer):
    """y = (x - mean) / sqrt(variance + eps) for each channel (Caffe's `batch_norm_layer.cpp`).

    Training takes the statistics of the device's batch and adds them to running sums: with f = moving_average_fraction
    and m elements a channel, blob 0 = f * blob 0 + mean, blob 1 = f * blob 1 + m / (m - 1) * variance,
    blob 2 = f * blob 2 + 1. With `use_global_stats`, by default in testing, mean and variance are blobs 0 and 1 over
    blob 2. Shapes: (C,), (C,), (1,).

    NVIDIA Caffe's `scale_bias` adds y * scale + bias with learned blobs 3 and 4 of shape (C,), starting at 1 and 0.
    """

    _shape: tuple[int, ...] | None = None
    _kept: Array | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.batch_norm_param
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, ...)", bottom[0])
        self._channels = channels = bottom[0].shape[1]
        self._use_stored = self.context.phase == caffe_pb2.TEST
        if param.HasField("use_global_stats"):
            self._use_stored = param.use_global_stats
        self._scale_bias = param.scale_bias or param.HasField("scale_filler") or param.HasField("bias_filler")
        zero, one = caffe_pb2.FillerParameter(value=0), caffe_pb2.FillerParameter(value=1)
        for shape in ((channels,), (channels,), (1,)):
            self.add_parameter(shape, zero)
        if self._scale_bias:
            self.add_parameter((channels,), param.scale_filler if param.HasField("scale_filler") else one)
            self.add_parameter((channels,), param.bias_filler if param.HasField("bias_filler") else zero)
        self._fix_statistics()
        self._make_buffers(channels)

    def _fix_statistics(self) -> None:
        """Keep the solver from the statistics: their learning rate is 0."""
        specs = self.param.param
        for index in range(STATISTICS):
            if index == len(specs):
                specs.add(lr_mult=0, decay_mult=0)
            elif specs[index].lr_mult != 0 and not self._scale_bias:
                raise self.error(f"param {index} holds statistics, which are not learned; give it lr_mult: 0")
            specs[index].lr_mult = 0

    def _make_buffers(self, channels: int) -> None:
        self._mean, self._inverse, self._variance, self._sum_dy_x, self._sum_dy = (
            self.backend.zeros((channels,)) for _ in range(5)
        )
        if not self._scale_bias:
            self._one, self._zero = self.backend.zeros((channels,)), self.backend.zeros((channels,))
            self.backend.fill(self._one, 1)

    @property
    def _scale(self) -> Array:
        return self.blobs[3].data if self._scale_bias else self._one

    @property
    def _bias(self) -> Array:
        return self.blobs[4].data if self._scale_bias else self._zero

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2 or shape[1] != self._channels:
            raise self.shape_error(f"the statistics need {self._channels} channels", bottom[0], self.blobs[0])
        top[0].reshape(shape)
        self._per_element = self._channels / max(math.prod(shape), 1)
        in_place = bottom[0] is top[0]
        if not in_place:
            self._kept = None
        elif self._kept is None or self._kept.shape != shape:
            self._kept = self.backend.zeros(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        if self._use_stored:
            self._load_statistics()
        else:
            self._measure(x)
        inputs = (x, self._mean, self._inverse, self._scale, self._bias)
        if self._kept is None:
            self.backend.apply(normalise, inputs, (y,))
        else:
            self.backend.apply(normalise_keeping, inputs, (self._kept, y))

    def _load_statistics(self) -> None:
        count = self.backend.view(self.blobs[2].data, ())
        inputs = (self.blobs[0].data, self.blobs[1].data, count, self.param.batch_norm_param.eps)
        self.backend.apply(stored_statistics, inputs, (self._mean, self._inverse))

    def _measure(self, x: Array) -> None:
        param = self.param.batch_norm_param
        backend = self.backend
        # Two passes: E(x^2) - E(x)^2 loses all digits where the mean is large.
        backend.reduce(scaled, (x, self._per_element), (self._mean,))
        backend.reduce(squared_distance, (x, self._mean, self._per_element), (self._variance,))
        backend.apply(inverse_deviation, (self._variance, param.eps), (self._inverse,))
        means, variances, count = (blob.data for blob in self.blobs[:STATISTICS])
        elements = round(1 / self._per_element)
        correction = elements / (elements - 1) if elements > 1 else 1.0
        inputs = (means, variances, self._mean, self._variance, param.moving_average_fraction, correction)
        backend.apply(running_sums, inputs, (means, variances))
        backend.apply(running_count, (count, param.moving_average_fraction), (count,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """dx = scale / deviation * (dy - mean(dy) - normal * mean(dy * normal)).

        With stored statistics, which do not depend on x, dx = scale / deviation * dy.
        """
        x = bottom[0].data if self._kept is None else self._kept
        dy, dx = top[0].diff, bottom[0].diff
        if not self._use_stored or self._wants(3) or self._wants(4):
            sums = (self._sum_dy_x, self._sum_dy)
            self.backend.reduce(gradient_sums, (x, dy, self._mean, self._inverse), sums)
        for index, total in ((3, self._sum_dy_x), (4, self._sum_dy)):
            if self._wants(index):
                put = self.backend.add if self.accumulate(index) else self.backend.copy
                put(total, self.blobs[index].diff)
        if not propagate_down[0]:
            return
        if self._use_stored:
            self.backend.apply(stored_input_gradient, (dy, self._inverse, self._scale), (dx,))
            return
        channels = (self._mean, self._inverse, self._scale, self._sum_dy_x, self._sum_dy)
        self.backend.apply(input_gradient, (x, dy, *channels, self._per_element), (dx,))

    def _wants(self, index: int) -> bool:
        return self._scale_bias and self.propagate_to_params[index]
