"""Batch normalisation (Ioffe and Szegedy 2015) with Caffe's running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import scaled, squared_distance
from caffepy.backend.types import BatchNormState
from caffepy.formats.dialect import LEAST_EPSILON
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayerContext, ScratchBuffer, register_layer

STATISTICS = 3
"""Number of blobs with running statistics: mean, variance, count."""
WITH_SCALE_AND_BIAS = 5
"""Number of blobs with NVIDIA Caffe's scale and bias."""

COPIED_PASSES = 2
"""Training passes that copy the batch's statistics instead of averaging, in NVIDIA's dialect."""


@expression
def blended(
    mean: Each, inverse: Each, old_mean: Each, old_variance: Each, passes: Channel, fraction: Scalar
) -> tuple[Each, Each]:
    momentum = 0.0 if passes < COPIED_PASSES else fraction
    return old_mean * momentum + mean * (1 - momentum), old_variance * momentum + (1 - momentum) / (inverse * inverse)


@expression
def next_pass(passes: Each) -> Each:
    return passes + 1


@expression
def stored_input_gradient(dy: Each, inverse: Channel, scale: Channel) -> Each:
    return dy * inverse * scale


@register_layer("BatchNorm")
class BatchNormLayer(Layer):
    """y = (x - mean) / sqrt(variance + eps) for each channel (Caffe's `batch_norm_layer.cpp`).

    x and y are (N, C, ...). Training uses the statistics of the device's batch and adds them to running sums. With
    f = moving_average_fraction and m elements a channel, blob 0 = f * blob 0 + mean, blob 1 = f * blob 1 +
    m / (m - 1) * variance, blob 2 = f * blob 2 + 1. With `use_global_stats`, the default in TEST, mean is
    blob 0 / blob 2 and variance is blob 1 / blob 2. Shapes of the blobs: (C,), (C,), (1,).

    NVIDIA Caffe's `scale_bias` computes y * scale + bias with learned blobs 3 and 4 of shape (C,), initially 1 and 0.
    Intel Caffe's `filler` and `use_weight_bias` do the same; `filler` fills the scale. With Intel's `stats_batch_size`
    each such part of the device's batch has its own mean and variance in training, and the running sums count each
    part as a batch. A device's batch that is not larger is one part. `--sync-bn` takes all images.

    In NVIDIA's dialect eps is at least 1e-5. Blobs 0 and 1 are moving averages, f * old + (1 - f) * new. The new
    variance is the batch's variance over m plus eps. The first two training passes of each run copy the new values.
    Blob 2 is 1. If a file has three blobs, blobs 0 and 1 are divided by its blob 2 when it is loaded.

    Raises:
        ConfigError: lr_mult of a statistics blob is not 0, in BVLC's dialect.
        ShapeError: the bottom has fewer than two axes, another number of channels than the statistics, or a number of
            images that is no multiple of stats_batch_size.
    """

    supports_half = True
    recordable = True
    stored_by_count = True
    learned: ClassVar[tuple[int, int]] = (3, 4)
    """Indices of the scale and the bias among the parameters, if `scale_bias`."""

    _shape: tuple[int, ...] | None = None
    _saved_bottom: ScratchBuffer | None = None
    _scale_bias = False
    _nvidia = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.batch_norm_param
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, ...)", bottom[0])
        self._channels = channels = bottom[0].shape[1]
        self._use_stored = self.context.phase == caffe_pb2.TEST
        if param.HasField("use_global_stats"):
            self._use_stored = param.use_global_stats
        fillers = ("scale_filler", "bias_filler", "filler")
        self._scale_bias = param.scale_bias or param.use_weight_bias or any(map(param.HasField, fillers))
        self._nvidia = self.context.nvidia
        self._epsilon = max(param.eps, LEAST_EPSILON) if self._nvidia else param.eps
        zero, one = caffe_pb2.FillerParameter(value=0), caffe_pb2.FillerParameter(value=1)
        for shape, filler in (((channels,), zero), ((channels,), zero), ((1,), one if self._nvidia else zero)):
            self.add_parameter(shape, filler)
        if self._scale_bias:
            given = next((name for name in ("scale_filler", "filler") if param.HasField(name)), None)
            self.add_parameter((channels,), one if given is None else getattr(param, given))
            self.add_parameter((channels,), param.bias_filler if param.HasField("bias_filler") else zero)
        self._fix_statistics()
        self._make_buffers(channels)

    def _fix_statistics(self) -> None:
        """Set the learning rate of the statistics to 0."""
        specs = self.param.param
        for index in range(STATISTICS):
            if index == len(specs):
                specs.add(lr_mult=0, decay_mult=0)
            elif specs[index].lr_mult != 0 and not self._scale_bias and not self._nvidia:
                raise self.error(f"param {index} holds statistics, which are not learned; give it lr_mult: 0")
            specs[index].lr_mult = 0

    def _make_buffers(self, channels: int) -> None:
        self._mean, self._inverse, self._sum_dy_x, self._sum_dy = (self.backend.zeros((channels,)) for _ in range(4))
        self._part_states: list[BatchNormState] = []
        if not self._scale_bias:
            self._one, self._zero = self.backend.zeros((channels,)), self.backend.zeros((channels,))
            self.backend.fill(self._one, 1)
        if self._nvidia:
            # Kernels write BVLC's sums of one pass here; `update_running_averages` updates the blobs.
            self._pass_mean, self._pass_variance = (self.backend.zeros((channels,)) for _ in range(2))
            self._pass_count, self._unit_count, self._passes = (self.backend.zeros((1,)) for _ in range(3))
            self.backend.fill(self._unit_count, 1)

    @property
    def uses_stored(self) -> bool:
        """Whether mean and variance come from the blobs, not from the batch."""
        return self._use_stored

    @property
    def scale_bias(self) -> bool:
        """Whether the layer has a learned scale and bias."""
        return self._scale_bias

    @property
    def can_fuse(self) -> bool:
        """Whether the layer is one normalisation of its whole bottom, with one top."""
        return not self._part_size

    @property
    def _part_size(self) -> int:
        """Number of images that share a mean and variance; 0: all."""
        own = not self._use_stored and self.context.all_reduce_mean is None
        return int(self.param.batch_norm_param.stats_batch_size) if own else 0

    def _parts(self, images: int) -> list[slice]:
        """Return the parts of the batch with their own statistics."""
        size = self._part_size or images
        return [slice(begin, begin + size) for begin in range(0, images, size)] if images > size else [slice(None)]

    def capture_blocker(self) -> str | None:
        if not self.communicates() or self.context.all_reduce_capturable:
            return None
        return "it averages statistics over all devices through the host"

    def communicates(self) -> bool:
        return self.context.all_reduce_mean is not None and not self._use_stored

    def running_statistics(self) -> Sequence[int]:
        return () if self._use_stored else range(STATISTICS)

    def local_statistics(self) -> Sequence[int]:
        """Mean and variance. The count in blob 2 is the same on all devices."""
        return () if self._use_stored or self.context.all_reduce_mean is not None else (0, 1)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST with the batch's statistics: the next training pass and snapshot read the changed statistics."""
        given = param.batch_norm_param
        return context.phase == caffe_pb2.TEST and given.HasField("use_global_stats") and not given.use_global_stats

    def state(self) -> Sequence[Array]:
        """The number of training passes, in NVIDIA's dialect."""
        return (self._passes,) if self._nvidia and not self._use_stored else ()

    def file_blob_order(self, counts: Sequence[int]) -> Sequence[int]:
        """NVIDIA Caffe 0.14 and 0.15 store scale, bias, mean and variance, (1, C, 1, 1) each, and an unused number."""
        if len(counts) == WITH_SCALE_AND_BIAS and counts[-1] == 1 != counts[0]:
            return (2, 3, 4, 0, 1)
        return range(len(counts))

    def blob_count_advice(self, number: int) -> str:
        if number == WITH_SCALE_AND_BIAS:
            return "the file has NVIDIA Caffe's scale and bias: give it batch_norm_param { scale_bias: true }"
        if number == STATISTICS:
            return "the file has no scale and bias: remove scale_bias, scale_filler and bias_filler"
        return super().blob_count_advice(number)

    def convert_loaded(self, stored: int) -> None:
        if stored == WITH_SCALE_AND_BIAS:
            self._count_statistics()
        if not self._nvidia or stored != STATISTICS:
            return
        mean, variance, count = self.blobs[:STATISTICS]
        divisor = float(count.host_data()[0])
        for blob in (mean, variance):
            if divisor:
                self.backend.from_host(blob.host_data() / divisor, blob.data)
            else:
                self.backend.fill(blob.data, 0)
        self.backend.fill(count.data, 1)

    def _count_statistics(self) -> None:
        """Set the count of an NVIDIA file without one to 1."""
        variance, count = self.blobs[1:STATISTICS]
        if not count.host_data()[0] and variance.host_data().any():
            self.backend.fill(count.data, 1)

    def update_running_averages(self) -> None:
        """Update blobs 0 and 1 from the batch's statistics in NVIDIA's dialect. In BVLC's the kernels have done so."""
        if not self._nvidia:
            return
        mean, variance = self.blobs[0].data, self.blobs[1].data
        passes = self.backend.view(self._passes, ())
        inputs = (
            self._mean,
            self._inverse,
            mean,
            variance,
            passes,
            self.param.batch_norm_param.moving_average_fraction,
        )
        self.backend.apply(blended, inputs, (mean, variance))
        self.backend.apply(next_pass, (self._passes,), (self._passes,))

    def compute_statistics(self, x: Array, n: BatchNormState) -> None:
        """Compute mean and variance of x, over all devices with `--sync-bn`, and update the running statistics."""
        if self.context.all_reduce_mean is None:
            self.backend.batch_norm_measure(x, n)
        else:
            self._compute_global_statistics(x, n, self.context.all_reduce_mean)
        self.update_running_averages()

    def _compute_global_statistics(self, x: Array, n: BatchNormState, all_reduce_mean: Callable[[Array], None]) -> None:
        elements, variance = x.size // self._channels, self._sum_dy
        # E[x^2] - E[x]^2 would cancel for large means, so the variance is computed around the global mean.
        self.backend.reduce(scaled, (x, 1 / elements), (n.mean,))
        all_reduce_mean(n.mean)
        self.backend.reduce(squared_distance, (x, n.mean, 1 / elements), (variance,))
        all_reduce_mean(variance)
        self.backend.batch_norm_finish(variance, elements * self.context.shard.world_size, n)

    def all_reduce_sums(self, sum_dy_x: Array, sum_dy: Array) -> tuple[Array, Array]:
        """Return the sums for the bottom's gradient: this device's, or with global statistics the mean over devices.

        The mean is right because each device computes the gradient of its own mean loss, and gradients are averaged.
        """
        if self.context.all_reduce_mean is None:
            return sum_dy_x, sum_dy
        for local, total in ((sum_dy_x, self._sum_dy_x), (sum_dy, self._sum_dy)):
            if local is not total:
                self.backend.copy(local, total)
            self.context.all_reduce_mean(total)
        return self._sum_dy_x, self._sum_dy

    def normalisation(self, scale: Array | None = None, bias: Array | None = None) -> BatchNormState:
        """Return the arrays of the layer for the backend's primitives, with the parameters of a fused Scale layer."""
        param = self.param.batch_norm_param
        own = [self.blobs[i].data for i in self.learned] if self._scale_bias else [self._one, self._zero]
        scale, bias = own[0] if scale is None else scale, own[1] if bias is None else bias
        mean, variance, count = (blob.data for blob in self.blobs[:STATISTICS])
        fraction = param.moving_average_fraction
        if self._nvidia and self._use_stored:
            count = self._unit_count
        elif self._nvidia:
            mean, variance, count, fraction = self._pass_mean, self._pass_variance, self._pass_count, 0.0
        stored = (mean, variance, count, self._epsilon, fraction)
        return BatchNormState(self._mean, self._inverse, scale, bias, *stored)

    def stored_statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """Return the stored mean and variance, (C,) each, and what is added to the variance."""
        n = self.normalisation()
        mean, variance, count = (
            np.asarray(self.backend.to_host(a), np.float32) for a in (n.sum_mean, n.sum_variance, n.count)
        )
        factor = np.float32(1 / count[0]) if count[0] else np.float32(0)
        return mean * factor, variance * factor, n.epsilon

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2 or shape[1] != self._channels:
            raise self.shape_error(f"the statistics need {self._channels} channels", bottom[0], self.blobs[0])
        size = self._part_size
        if size and shape[0] > size and shape[0] % size:
            raise self.shape_error(f"the batch must be a multiple of stats_batch_size, which is {size}", bottom[0])
        top[0].reshape(shape)
        self._saved_bottom = self.scratch("saved bottom", shape, self.dtype) if bottom[0] is top[0] else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, n = bottom[0].data, self.normalisation()
        if self._saved_bottom is not None:
            self.backend.copy(x, self._saved_bottom.array)
            x = self._saved_bottom.array
        parts = self._parts(x.shape[0])
        if len(parts) > 1:
            self._forward_parts(parts, x, top[0].data)
            return
        if self._use_stored:
            self.backend.batch_norm_load(n)
        else:
            self.compute_statistics(x, n)
        self.backend.batch_norm_forward(x, n, top[0].data)

    def _forward_parts(self, parts: list[slice], x: Array, y: Array) -> None:
        while len(self._part_states) < len(parts):
            mean, inverse = (self.backend.zeros((self._channels,)) for _ in range(2))
            self._part_states.append(replace(self.normalisation(), mean=mean, inverse=inverse))
        n = self.normalisation()
        for part, kept in zip(parts, self._part_states, strict=False):
            self.compute_statistics(x[part], n)
            self.backend.copy(n.mean, kept.mean)
            self.backend.copy(n.inverse, kept.inverse)
            self.backend.batch_norm_forward(x[part], n, y[part])

    def _backward_parts(self, parts: list[slice], x: Array, dy: Array, dx: Array | None) -> None:
        sums = self._sum_dy_x, self._sum_dy
        for part, kept in zip(parts, self._part_states, strict=False):
            n = replace(self.normalisation(), mean=kept.mean, inverse=kept.inverse)
            self.backend.batch_norm_backward_sums(x[part], [dy[part]], n, sums)
            self._add_learned(sums)
            if dx is not None:
                self.backend.batch_norm_backward_data(x[part], dy[part], n, sums, dx[part])

    def _add_learned(self, sums: Sequence[Array]) -> None:
        """Add the gradients of scale and bias to their diffs."""
        for index, total in zip(self.learned, sums, strict=True):
            if self._wants(index):
                put = self.backend.add if self.accumulate(index) else self.backend.copy
                put(total, self.blobs[index].diff)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """dx = scale / deviation * (dy - mean(dy) - normal * mean(dy * normal)).

        With stored statistics, which do not depend on x, dx = scale / deviation * dy.
        """
        x, n = bottom[0].data if self._saved_bottom is None else self._saved_bottom.array, self.normalisation()
        dy, dx = top[0].diff, bottom[0].diff
        parts = self._parts(x.shape[0])
        if len(parts) > 1:
            self._backward_parts(parts, x, dy, dx if propagate_down[0] else None)
            return
        if not self._use_stored or any(map(self._wants, self.learned)):
            self.backend.batch_norm_backward_sums(x, [dy], n, (self._sum_dy_x, self._sum_dy))
        self._add_learned((self._sum_dy_x, self._sum_dy))
        if not propagate_down[0]:
            return
        if self._use_stored:
            self.backend.apply(stored_input_gradient, (dy, n.inverse, n.scale), (dx,))
        else:
            self.backend.batch_norm_backward_data(x, dy, n, self.all_reduce_sums(self._sum_dy_x, self._sum_dy), dx)

    def _wants(self, index: int) -> bool:
        return self._scale_bias and self.propagate_to_params[index]
