"""Fused layers: how the groups that `fuse.py` finds are computed.

Each keeps its members, whose parameters and settings it uses; results are theirs to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Channel, Each, expression
from caffepy.backend.types import BatchNormState, NormalisedBottom, mask_bytes
from caffepy.blob import Blob
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.common.inner_product import InnerProductLayer
from caffepy.layers.common.rearrange import turn_channels
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.normalization.batch_norm import BatchNormLayer
from caffepy.layers.normalization.scale import ScaleLayer
from caffepy.layers.vision.convolution import ConvolutionLayer
from caffepy.proto import caffe_pb2


@expression
def rectified_with_channel(x: Each, y: Channel) -> Each:
    return max(x + y, 0.0)


class FusedLayer(Layer):
    """Several layers in one.

    Args:
        members: in the order in which they would be computed.
    """

    supports_half = True

    def __init__(self, members: Sequence[Layer]) -> None:
        param = caffe_pb2.LayerParameter(
            name=" + ".join(m.name for m in members), type=" + ".join(m.type for m in members)
        )
        super().__init__(param, members[0].context)
        self.members = list(members)
        self.dtype = members[0].dtype
        self.loss_weights = list(members[-1].loss_weights)
        self.blobs = [blob for member in members for blob in member.blobs]
        self.propagate_to_params = [wanted for member in members for wanted in member.propagate_to_params]

    def capture_blocker(self) -> str | None:
        return next((blocker for member in self.members if (blocker := member.capture_blocker())), None)

    def communicates(self) -> bool:
        return any(member.communicates() for member in self.members)

    def raise_device_errors(self) -> None:
        for member in self.members:
            member.raise_device_errors()


class FusedShuffle(FusedLayer):
    """y = x with its channels, seen as (outer, inner), turned into (inner, outer): Reshape, Permute and Reshape.

    Args:
        members: these.
        between: the tops of the first two, which hold nothing.
    """

    def __init__(self, members: Sequence[Layer], between: Sequence[Blob]) -> None:
        super().__init__(members)
        self._between = list(between)

    def outer(self, bottom: Blob, top: Blob) -> int:
        """The outer number, from the shapes between; 0 where the layers do something else."""
        x, (parts, turned) = bottom.shape, (blob.shape for blob in self._between)
        order = list(self.members[1].param.permute_param.order)
        if len(x) != 4 or len(parts) not in (4, 5) or order + list(range(len(order), len(parts))) != [
            0, 2, 1, *range(3, len(parts))
        ]:  # fmt: skip
            return 0
        pixels = x[2:] if len(parts) == 5 else (x[2] * x[3],)
        outer = parts[1]
        fits = parts == (x[0], outer, x[1] // max(outer, 1), *pixels) and turned == (x[0], parts[2], outer, *pixels)
        return outer if fits and top.shape == x and parts[1] * parts[2] == x[1] else 0

    def _steps(self, bottom: Blobs, top: Blobs) -> list[tuple[Layer, Blob, Blob]]:
        blobs = [bottom[0], *self._between, top[0]]
        return list(zip(self.members, blobs, blobs[1:], strict=False))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for member, before, after in self._steps(bottom, top):
            member.reshape([before], [after])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        outer = self.outer(bottom[0], top[0])
        if outer:
            turn_channels(self.backend, bottom[0].data, top[0].data, outer)
            return
        for member, before, after in self._steps(bottom, top):  # with images of another size they may do more
            member.forward([before], [after])

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        outer = self.outer(bottom[0], top[0])
        if outer and propagate_down[0]:
            turn_channels(self.backend, top[0].diff, bottom[0].diff, bottom[0].shape[1] // outer)
        elif propagate_down[0]:
            for member, before, after in reversed(self._steps(bottom, top)):
                member.backward([after], [True], [before])


class FusedActivation(FusedLayer):
    """y = f(weights * x + bias): a Convolution and its ReLU, or an InnerProduct and its ReLU, Sigmoid or TanH.

    f is the ReLU where the second member has no formula `behind_bias`.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.members[0].reshape(bottom, top)

    @property
    def _activation(self) -> ActivationLayer:
        layer = self.members[1]
        assert isinstance(layer, ActivationLayer)
        return layer

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        first = self.members[0]
        if isinstance(first, ConvolutionLayer):
            first.compute(bottom[0], top[0], relu=True)
            return
        assert isinstance(first, InnerProductLayer)
        first.compute(bottom[0], top[0], self._activation.behind_bias or rectified_with_channel)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """The activation's gradient overwrites the top's diff, which no other layer reads."""
        first, y = self.members[0], top[0]
        assert isinstance(first, ConvolutionLayer | InnerProductLayer)
        wanted = len(first.blobs) > 1 and first.propagate_to_params[1]
        dbias = first.blobs[1].diff if wanted else None
        accumulate, gradient = wanted and first.accumulate(1), self._activation.gradient_of_top
        if gradient is None:
            self.backend.relu_backward(y.data, y.diff, y.diff, dbias, accumulate)
        else:
            self.backend.activation_backward(gradient, y.data, y.diff, y.diff, dbias, accumulate)
        first.propagate(bottom[0], y.diff, propagate_down[0])


class FusedNormalisation(FusedLayer):
    """y = max(scale * normal(x) + bias + residual, 0), handed to several readers.

    A BatchNorm, then where they are there a Scale, an Eltwise sum, a ReLU and a Split. Bottoms: x, and the residual if
    there is a sum. The gradient of the sum is the second bottom's own, and lies in its diff where that is wanted. Diffs
    of the tops are overwritten: no other layer reads them.

    Args:
        members: the layers.
        gradient_tops: for each top whether a gradient comes back through it.
    """

    def __init__(self, members: Sequence[Layer], gradient_tops: Sequence[bool]) -> None:
        super().__init__(members)
        norm = members[0]
        assert isinstance(norm, BatchNormLayer)
        self._norm = norm
        self._scale = next((m for m in members if isinstance(m, ScaleLayer)), None)
        types = {member.type for member in members}
        self._adds, self._relu = "Eltwise" in types, "ReLU" in types
        self._gradient_tops = list(gradient_tops)
        self.sums: Array | None = None
        """Where the convolution before adds up its output."""
        self.reader: MeasuredConvolution | None = None
        """The only reader of the only top, if it may work the top out by itself."""
        self._measured = False
        self._mask: ScratchBuffer | None = None
        self._added: tuple[Array, Array] | None = None
        """The sums over the top's gradient, if the layer that computed that added them up."""
        channels = norm.blobs[0].shape
        self._sum_dy_x, self._sum_dy = (self.backend.zeros(channels) for _ in range(2))

    @property
    def uses_stored(self) -> bool:
        """Whether mean and variance are the stored ones."""
        return self._norm.uses_stored

    @property
    def is_plain(self) -> bool:
        """Whether the only top is the normalised bottom, perhaps rectified, with statistics of this pass."""
        return not (self._adds or self.uses_stored) and self._gradient_tops == [True]

    def as_bottom(self, x: Array, backward: bool) -> NormalisedBottom:
        """The only top as its reader's bottom; in a backward pass, who asks adds up its gradient before this layer."""
        if backward:
            self._added = self._gradient_targets()
        return NormalisedBottom(x, self._normalisation(), self._relu, self._added)

    def sums_for(self, channels: int) -> Array:
        """A buffer for sums of the bottom by channel, (2, C); the next forward pass takes its statistics from it."""
        if self.sums is None:
            self.sums = self.backend.zeros((2, channels))
        self._measured = True
        return self.sums

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2 or (shape[1],) != self._norm.blobs[0].shape:
            raise self._norm.shape_error("the statistics have another number of channels", bottom[0])
        if self._adds and bottom[1].shape != shape:
            raise self.shape_error("all bottoms must have one shape", bottom[0], bottom[1])
        for blob in top:
            blob.reshape(shape)
        size = mask_bytes(bottom[0].count)
        training = self.context.phase == caffe_pb2.TRAIN
        masked = self._adds and self._relu and training
        self._mask = self.scratch("mask", (size,), "uint8") if masked else None

    def _normalisation(self) -> BatchNormState:
        if self._scale is None:
            return self._norm.normalisation()
        blobs = self._scale.blobs
        return self._norm.normalisation(blobs[0].data, blobs[1].data if len(blobs) > 1 else None)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, n = bottom[0], self._normalisation()
        if self.uses_stored:
            self.backend.batch_norm_load(n)
        elif self._measured:
            assert self.sums is not None
            self.backend.batch_norm_measure_sums(self.sums, x.count // x.shape[1], n)
            self._norm.keep_statistics()
        else:
            self._norm.compute_statistics(x.data, n)
        self._measured, self._added = False, None
        if self.reader is not None and self.reader.normalises:
            return
        residual = bottom[1].data if self._adds else None
        y = top[0].data
        mask = None if self._mask is None else self._mask.array
        self.backend.batch_norm_forward(x.data, n, y, residual, self._relu, mask)
        for blob in top[1:]:
            blob.bind(data=y)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        x, n = bottom[0].data, self._normalisation()
        wanted = [blob for blob, comes in zip(top, self._gradient_tops, strict=True) if comes] or list(top[:1])
        dys = [blob.diff for blob in wanted]
        total = self._total(dys, bottom, propagate_down)
        scale, bias = self._added or self._gradient_targets()
        if self._added is None:
            mask = None if self._mask is None else self._mask.array
            self.backend.batch_norm_backward_sums(x, dys, n, (scale, bias), self._relu, mask, total)
        self._added = None
        self._add_to_parameters(scale, bias)
        if propagate_down[0]:
            dy = dys[0] if total is None else total
            masked = self._relu and total is None
            sums = self._norm.all_reduced(scale, bias)
            self.backend.batch_norm_backward_data(x, dy, n, sums, bottom[0].diff, masked)

    def _total(self, dys: list[Array], bottom: Blobs, propagate_down: list[bool]) -> Array | None:
        """An array for the gradient before the ReLU; None: it is recomputed from the only top's."""
        if self._adds and propagate_down[1]:
            return bottom[1].diff
        return dys[0] if self._adds or len(dys) > 1 else None

    def _learned(self) -> list[tuple[Layer, int]]:
        """Which parameters are scale and bias: (layer, index)."""
        if self._scale is not None:
            return [(self._scale, index) for index in range(len(self._scale.blobs))]
        return [(self._norm, 3), (self._norm, 4)] if self._norm.scale_bias else []

    def _gradient_targets(self) -> tuple[Array, Array]:
        """Arrays for the gradients of scale and bias: the parameters' diffs themselves where nothing must be added."""
        targets = [self._sum_dy_x, self._sum_dy]
        learned = self._learned()
        if len({id(layer.blobs[index].gradient_owner) for layer, index in learned}) < len(learned):
            return targets[0], targets[1]  # scale and bias are one parameter: its diff cannot hold both sums
        for i, (layer, index) in enumerate(learned):
            blob = layer.blobs[index]
            if layer.propagate_to_params[index] and not blob.gradient_started:
                targets[i] = blob.diff
        return targets[0], targets[1]

    def _add_to_parameters(self, scale: Array, bias: Array) -> None:
        for (layer, index), total in zip(self._learned(), (scale, bias), strict=False):
            blob = layer.blobs[index]
            if not layer.propagate_to_params[index]:
                continue
            if layer.accumulate(index):
                self.backend.add(total, blob.diff)
            elif total is not blob.diff:
                self.backend.copy(total, blob.diff)


class MeasuredConvolution(FusedLayer):
    """A Convolution that adds up its output for the BatchNorm behind it, where its plan can do so for nothing.

    Likewise its bottom's gradient for a BatchNorm before it. Such a bottom is worked out in both passes and not filled.
    """

    def __init__(self, convolution: ConvolutionLayer, norm: FusedNormalisation) -> None:
        super().__init__([convolution])
        self._convolution = convolution
        self._normalisation = norm
        self.source: tuple[FusedNormalisation, Blob] | None = None
        """The only writer of the bottom, which has no other reader, and what that one normalises."""

    @property
    def normalises(self) -> bool:
        """Whether neither pass reads the bottom."""
        first = self._convolution
        return self.source is not None and first.gradients is not None and first.plan.forward_normalised is not None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._convolution.reshape(bottom, top)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        first = self._convolution
        single_device = self.context.all_reduce_mean is None
        sums = self._normalisation.sums_for(top[0].shape[1]) if single_device and first.plan.gives_sums else None
        forward = first.plan.forward_normalised
        if self.source is None or forward is None or not self.normalises:
            first.compute(bottom[0], top[0], sums=sums)
            return
        norm, x = self.source
        first.compute_normalised(forward, norm.as_bottom(x.data, False), top[0], sums)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        gradients = self._convolution.gradients if propagate_down[0] else None
        if self.source is None or gradients is None:
            self._convolution.backward(top, propagate_down, bottom)
            return
        norm, x = self.source
        self._convolution.propagate_normalised(gradients, norm.as_bottom(x.data, True), top[0].diff, bottom[0].diff)
