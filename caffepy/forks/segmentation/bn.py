"""BN: batch normalisation with a learned scale and bias, of SegNet, PSPNet and TSN."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.backend.types import BatchNormState
from caffepy.formats.alias import register_alias
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.layer import Blobs, LayerContext, register_layer

SEGNET_EPSILON = 1e-9
SEGNET_FIELDS = ("scale_filler", "shift_filler", "bn_mode")
STORED_FIELDS = ("slope_filler", "bias_filler", "momentum", "eps", "frozen", "inverse_std")


@expression
def moved(new: Each, old: Each, momentum: Scalar) -> Each:
    return momentum * old + (1 - momentum) * new


@expression
def moved_variance(inverse: Each, old: Each, momentum: Scalar, epsilon: Scalar) -> Each:
    return momentum * old + (1 - momentum) * max(1 / (inverse * inverse) - epsilon, 0.0)


@expression
def variance_of(inverse: Each, epsilon: Scalar) -> Each:
    return max(1 / (inverse * inverse) - epsilon, 0.0)


register_alias("CuDNNBatchNorm", "BN", fields={"scale_filler": "slope_filler"})


@register_layer("BN")
class BNLayer(BatchNormLayer):
    """y = (x - mean) / sqrt(variance + eps) * scale + bias for each channel, with learned scale and bias.

    x and y are (N, C, ...). Blobs 0 and 1, (C,) each, are the scale and the bias. Forks define two layers of this name;
    the fields of `bn_param` decide. Without one of them the layer is PSPNet's.

    PSPNet, ICNet, TSN, LargeMargin_Softmax_Loss and caffe-windows (`bn_layer.cpp` of each): `slope_filler`,
    `bias_filler`, `momentum`, `eps`, `frozen`. Training uses the batch's statistics, with the variance over m
    elements, and moves blobs 2 and 3: blob 2 = momentum * blob 2 + (1 - momentum) * mean, blob 3 likewise with the
    variance. TEST, and training with `frozen`, use blobs 2 and 3 as mean and variance; `frozen` also sets lr_mult
    of scale and bias to 0. Initially blob 2 is 0 and blob 3 is 0, or 1 if `frozen`. TSN's first Caffe,
    caffe-windows and LargeMargin_Softmax_Loss on the CPU store 1 / sqrt(variance + eps) in blob 3. Their files do
    not show that, so caffepy's field `inverse_std: true` says so. Then blob 3 is initially 1. On a GPU these forks
    give cuDNN the variance, over m - 1 elements.

    SegNet, ENet, SpatialTransformerLayer (`bn_layer.cpp` of caffe-segnet): `scale_filler`, `shift_filler`, `bn_mode`.
    LEARN uses the batch's statistics with eps = 1e-9 in both phases. INFERENCE computes y = x * scale + bias: SegNet's
    compute_bn_statistics.py puts stored statistics into both. Optional tops 1 and 2, (1, C, 1, 1), are the batch's mean
    and variance; they have no gradient.

    GENet's CuDNNBatchNorm (`cudnn_batch_norm_layer.cpp`) is read as PSPNet's. Its `momentum` is 0.999 by default, its
    `scale_filler` fills the scale, and cuDNN's stored variance is over m - 1 elements.

    The fillers' default, as in the forks, is constant 0.

    Raises:
        ConfigError: fields of both layers are set, momentum is not from 0 to 1, or tops 1 and 2 exist without the
            batch's statistics.
        ShapeError: the bottom has fewer than two axes, or another number of channels than the parameters.
    """

    tops = (1, 3)
    no_gradient_tops = frozenset({1, 2})
    learned = (0, 1)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bn_param
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, ...)", bottom[0])
        of_segnet, stored = ([f for f in fields if param.HasField(f)] for fields in (SEGNET_FIELDS, STORED_FIELDS))
        if of_segnet and stored:
            raise self.error(f"bn_param has {of_segnet[0]} of SegNet and {stored[0]} of PSPNet and TSN; keep one kind")
        if not 0 <= param.momentum <= 1:
            raise self.error(f"momentum is {param.momentum:g}; it must be from 0 to 1")
        self._channels = channels = bottom[0].shape[1]
        self._segnet = bool(of_segnet)
        self._inference = param.bn_mode == caffe_pb2.BNParameter.INFERENCE
        self._inverse_std = param.inverse_std
        self._scale_bias = True
        self._use_stored = self._inference or (
            not self._segnet and (param.frozen or self.context.phase == caffe_pb2.TEST)
        )
        if len(top) > 1 and (self._use_stored or not self._segnet):
            raise self.error("tops 1 and 2 are the batch's statistics, which only SegNet's bn_mode LEARN gives")
        fillers = ("scale_filler", "shift_filler") if self._segnet else ("slope_filler", "bias_filler")
        for filler in fillers:
            self.add_parameter((channels,), getattr(param, filler))
        if not self._segnet:
            start = float(param.frozen or param.inverse_std)
            for value in (0.0, start):
                self.add_parameter((channels,), caffe_pb2.FillerParameter(value=value))
        self._fix_rates()
        self._make_buffers(channels)
        self._other_mean, self._other_variance = (self.backend.zeros((channels,)) for _ in range(2))
        self._count = self.backend.zeros((1,))
        self.backend.fill(self._other_variance, 1)
        self.backend.fill(self._count, 1)

    def _fix_rates(self) -> None:
        """Set the learning rates of the statistics to 0, and with `frozen` those of scale and bias."""
        specs = self.param.param
        fixed = () if self._segnet else range(0 if self.param.bn_param.frozen else 2, 4)
        while fixed and len(specs) < 4:
            specs.add()
        for index in fixed:
            specs[index].lr_mult = specs[index].decay_mult = 0

    @property
    def can_fuse(self) -> bool:
        return len(self.param.top) == 1

    @property
    def _part_size(self) -> int:
        return 0

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """Never: tests use the stored statistics, or keep none."""
        return False

    def running_statistics(self) -> Sequence[int]:
        return () if self._use_stored or self._segnet else (2, 3)

    def local_statistics(self) -> Sequence[int]:
        return () if self.context.all_reduce_mean is not None else self.running_statistics()

    def file_blob_order(self, counts: Sequence[int]) -> Sequence[int]:
        return range(len(counts))

    def blob_count_advice(self, number: int) -> str:
        if number == 4 and self._segnet:
            return "the file has PSPNet's stored statistics: give slope_filler and bias_filler in place of SegNet's"
        if number == 2 and not self._segnet:
            return "the file is SegNet's: give scale_filler and shift_filler"
        return super().blob_count_advice(number)

    def convert_loaded(self, stored: int) -> None:
        """Files hold the parameters as the layer has them."""

    def normalisation(self, scale: Array | None = None, bias: Array | None = None) -> BatchNormState:
        own = [blob.data for blob in self.blobs[:2]]
        scale, bias = own[0] if scale is None else scale, own[1] if bias is None else bias
        # Kernels write the statistics of one pass to the other arrays. With INFERENCE these stay 0, 1 and 1.
        mean, variance = self._other_mean, self._other_variance
        epsilon = SEGNET_EPSILON if self._segnet else self.param.bn_param.eps
        if self._use_stored and not self._segnet:
            mean = self.blobs[2].data
            if self._inverse_std:
                self.backend.apply(variance_of, (self.blobs[3].data, 0.0), (variance,))
            else:
                variance = self.blobs[3].data
        if self._inference or (self._use_stored and self._inverse_std):
            epsilon = 0.0
        return BatchNormState(self._mean, self._inverse, scale, bias, mean, variance, self._count, epsilon, 0.0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        for blob in top[1:]:
            blob.reshape((1, self._channels, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        super().forward(bottom, top)
        if len(top) > 1:
            self.backend.copy(self._mean, self.backend.flat(top[1].data))
        if len(top) > 2:
            self.backend.apply(variance_of, (self._inverse, SEGNET_EPSILON), (self.backend.flat(top[2].data),))

    def update_running_averages(self) -> None:
        """Move blobs 2 and 3 towards the batch's statistics."""
        if self._segnet:
            return
        param, mean, variance = self.param.bn_param, self.blobs[2].data, self.blobs[3].data
        self.backend.apply(moved, (self._mean, mean, param.momentum), (mean,))
        if self._inverse_std:
            self.backend.apply(moved, (self._inverse, variance, param.momentum), (variance,))
        else:
            self.backend.apply(moved_variance, (self._inverse, variance, param.momentum, param.eps), (variance,))
