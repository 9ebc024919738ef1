"""Groups of layers that are computed as one; `fuse.py` finds them.

Each keeps its members, the layers of the net, and their parameters. Results equal those of the members by themselves up
to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Channel, Each, Expression, expression
from caffepy.backend.formulas import plus_rectified, rectified_with_channel, where_positive
from caffepy.backend.types import BatchNormState, NormalisedBottom, mask_bytes
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.activation import ActivationLayer
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.inner_product import InnerProductLayer
from caffepy.layers.layer import Blobs, Layer, ScratchBuffer
from caffepy.layers.scale import AxpyLayer, ScaleLayer
from caffepy.layers.tensor import transpose_channels


class FusedLayer(Layer):
    """A group of layers computed as one.

    Args:
        members: the layers in the order of the unfused schedule.
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
        members: the three layers.
        between: the tops of the first two layers; they are not filled.
    """

    def __init__(self, members: Sequence[Layer], between: Sequence[Blob]) -> None:
        super().__init__(members)
        self._between = list(between)

    def outer(self, bottom: Blob, top: Blob) -> int:
        """Return `outer`, from the shapes between; 0 if the layers do not shuffle channels."""
        x, (parts, turned) = bottom.shape, (blob.shape for blob in self._between)
        order = list(self.members[1].param.permute_param.order)
        if (
            len(x) != 4
            or len(parts) not in (4, 5)
            or order + list(range(len(order), len(parts))) != [0, 2, 1, *range(3, len(parts))]
        ):
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
            transpose_channels(self.backend, bottom[0].data, top[0].data, outer)
            return
        for member, before, after in self._steps(bottom, top):  # other sizes may be no shuffle
            member.forward([before], [after])

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        outer = self.outer(bottom[0], top[0])
        if outer and propagate_down[0]:
            transpose_channels(self.backend, top[0].diff, bottom[0].diff, bottom[0].shape[1] // outer)
        elif propagate_down[0]:
            for member, before, after in reversed(self._steps(bottom, top)):
                member.backward([after], [True], [before])


class FusedRows(FusedLayer):
    """y = rows of x with channels last: Permute and Flatten, or Permute and Reshape.

    This is the memory order of x, an image or volume. y shares the memory of x.

    Args:
        members: the two layers.
        between: the top of the first layer; it is not filled.
    """

    def __init__(self, members: Sequence[Layer], between: Blob) -> None:
        super().__init__(members)
        self._between = [between]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        permute, flatten = self.members
        permute.reshape(bottom, self._between)
        flatten.reshape(self._between, top)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        rows = self.backend.view(self.backend.flat(bottom[0].data), top[0].shape)
        if self.members[1].tops_overwritten:
            self.backend.copy(rows, top[0].data)
        else:
            top[0].bind(data=rows)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            bottom[0].bind(diff=self.backend.view(self.backend.flat(top[0].diff), bottom[0].shape))


class FusedActivation(FusedLayer):
    """y = f(weights * x + bias): a Convolution and its ReLU, or an InnerProduct and its ReLU, Sigmoid or TanH.

    f is the ReLU if the second member has no formula `forward_with_bias`.
    """

    reader_rectifies = False
    """Whether the only reader of the top applies the activation's gradient."""

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
        first.compute(bottom[0], top[0], self._activation.forward_with_bias or rectified_with_channel)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Run the group backward; the activation's gradient overwrites the top's diff, which no other layer reads."""
        first = self.members[0]
        assert isinstance(first, ConvolutionLayer | InnerProductLayer)
        if not self.reader_rectifies:
            self.apply_gradient(top[0])
        first.propagate(bottom[0], top[0].diff, propagate_down[0])

    def apply_gradient(self, y: Blob) -> None:
        """Apply the activation's gradient to the diff of the top, or of its maxima, and compute the bias's gradient."""
        first = self.members[0]
        wanted = len(first.blobs) > 1 and first.propagate_to_params[1]
        dbias = first.blobs[1].diff if wanted else None
        accumulate, gradient = wanted and first.accumulate(1), self._activation.gradient_from_top
        if gradient is None:
            self.backend.relu_backward(y.data, y.diff, y.diff, dbias, accumulate)
        else:
            self.backend.activation_backward(gradient, y.data, y.diff, y.diff, dbias, accumulate)


class RectifiedPooling(FusedLayer):
    """The maxima over windows of y = max(x, 0), with the gradients of the ReLU and of the convolution's bias.

    A maximum is positive where its element of y is, and its gradient goes to that element alone. So the ReLU's gradient
    is taken at the maxima, which are fewer than the elements. It overwrites the top's diff, which no other layer reads.

    Args:
        pooling: the layer.
        source: the convolution and the ReLU.
    """

    def __init__(self, pooling: Layer, source: FusedActivation) -> None:
        super().__init__([pooling])
        self._source = source
        source.reader_rectifies = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.members[0].reshape(bottom, top)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.members[0].forward(bottom, top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._source.apply_gradient(top[0])
        self.members[0].backward(top, propagate_down, bottom)


@expression
def gated_rectified(x: Each, b: Each, factor: Channel) -> Each:
    return max(factor * x + b, 0.0)


@expression
def gradient_of_two(y: Each, dy: Each, other: Each) -> Each:
    return dy + other if y > 0 else 0.0


@expression
def both_gradients(y: Each, dy: Each) -> tuple[Each, Each]:
    dx = dy if y > 0 else 0.0
    return dx, dx


@expression
def both_gradients_of_two(y: Each, dy: Each, other: Each) -> tuple[Each, Each]:
    dx = dy + other if y > 0 else 0.0
    return dx, dx


class FusedSum(FusedLayer):
    """y = max(a + b, 0), with one top for each reader: an Eltwise sum, a ReLU and optionally a Split.

    The tops' diffs are overwritten: no other layer reads them.

    Args:
        members: the layers.
        gradient_tops: for each top whether it receives a gradient.
    """

    def __init__(self, members: Sequence[Layer], gradient_tops: Sequence[bool]) -> None:
        super().__init__(members)
        self._gradient_tops = list(gradient_tops)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.members[0].reshape(bottom, top)
        for blob in top[1:]:
            blob.reshape(top[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._apply(plus_rectified, [blob.data for blob in bottom], top)

    def _apply(self, formula: Expression, inputs: Sequence[Array], top: Blobs, axis: int = 1) -> None:
        y = top[0].data
        self.backend.apply(formula, inputs, (y,), axis)
        for blob in top[1:]:
            blob.bind(data=y)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._add_up(top, [blob.diff for blob, down in zip(bottom, propagate_down, strict=True) if down])

    def _add_up(self, top: Blobs, dxs: Sequence[Array]) -> None:
        """Write the sum of the tops' gradients, where the ReLU was on, to one or two arrays."""
        if not dxs:
            return
        dys = _wanted_diffs(top, self._gradient_tops)
        if len(dys) > 2:
            self.backend.add_n(dys[1:], dys[1])
        one, two = (where_positive, gradient_of_two) if len(dxs) == 1 else (both_gradients, both_gradients_of_two)
        self.backend.apply(one if len(dys) == 1 else two, (top[0].data, *dys[:2]), dxs)


class FusedGate(FusedSum):
    """y = max(factor * x + b, 0): an Axpy, or a Scale with two bottoms and an Eltwise sum; a ReLU, optionally a Split.

    Bottoms: factor, x and b, as of Axpy. The sum's gradient equals b's gradient and is stored in its diff.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        gate, *others = self.members
        if isinstance(gate, AxpyLayer):
            gate.reshape(bottom, top)
        else:
            gate.reshape(bottom[1::-1], top)
            others[0].reshape(bottom[1:], top)
        for blob in top[1:]:
            blob.reshape(top[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        gate, (factor, x, b) = self.members[0], (blob.data for blob in bottom)
        if isinstance(gate, AxpyLayer):
            self._apply(gated_rectified, (x, b, gate.factors(factor)), top, 0)
        else:
            assert isinstance(gate, ScaleLayer)
            self._apply(gated_rectified, (x, b, factor), top, gate.axis)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        gate, summed = self.members[0], bottom[2]
        self._add_up(top, [summed.diff])
        if isinstance(gate, AxpyLayer):
            gate.backward([summed], [*propagate_down[:2], False], bottom)
        else:
            gate.backward([summed], propagate_down[1::-1], bottom[1::-1])


class FusedNormalisation(FusedLayer):
    """y = max(scale * normal(x) + bias + residual, 0), with one top for each reader.

    A BatchNorm, then optionally a Scale, an Eltwise sum, a ReLU and a Split. Bottoms: x, and the residual if there is a
        sum. The sum's gradient equals the second bottom's gradient and is stored in its diff if needed. The tops' diffs
        are overwritten: no other layer reads them.

    Args:
        members: the layers.
        gradient_tops: for each top whether it receives a gradient.
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
        """The buffer in which the preceding convolution sums its output."""
        self.reader: MeasuredConvolution | None = None
        """The only reader of the only top, if it may recompute the top by itself."""
        self._measured = False
        self._mask: ScratchBuffer | None = None
        self._added: tuple[Array, Array] | None = None
        """The sums over the top's gradient, if the layer that computed the gradient provides them."""
        channels = norm.blobs[0].shape
        self._sum_dy_x, self._sum_dy = (self.backend.zeros(channels) for _ in range(2))

    @property
    def uses_stored(self) -> bool:
        """Whether the stored mean and variance are used."""
        return self._norm.uses_stored

    @property
    def is_plain(self) -> bool:
        """Whether the only top is the normalised bottom, optionally rectified, with this batch's statistics."""
        return not (self._adds or self.uses_stored) and self._gradient_tops == [True]

    def as_bottom(self, x: Array, backward: bool) -> NormalisedBottom:
        """Return the only top for its reader; in a backward pass the reader sums its gradient before this layer
        runs.
        """
        if backward:
            self._added = self._gradient_targets()
        return NormalisedBottom(x, self._normalisation(), self._relu, self._added)

    def sums_for(self, channels: int) -> Array:
        """Return a buffer (2, C) for channel sums of the bottom; the next forward pass computes statistics from it."""
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
            self._norm.update_running_averages()
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
        dys = _wanted_diffs(top, self._gradient_tops)
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
            sums = self._norm.all_reduce_sums(scale, bias)
            self.backend.batch_norm_backward_data(x, dy, n, sums, bottom[0].diff, masked)

    def _total(self, dys: list[Array], bottom: Blobs, propagate_down: list[bool]) -> Array | None:
        """Return an array for the gradient before the ReLU; None: it is recomputed from the only top's gradient."""
        if self._adds and propagate_down[1]:
            return bottom[1].diff
        return dys[0] if self._adds or len(dys) > 1 else None

    def _learned(self) -> list[tuple[Layer, int]]:
        """Return the scale and bias parameters as (layer, index)."""
        if self._scale is not None:
            return [(self._scale, index) for index in range(len(self._scale.blobs))]
        return [(self._norm, index) for index in self._norm.learned] if self._norm.scale_bias else []

    def _gradient_targets(self) -> tuple[Array, Array]:
        """Return arrays for the gradients of scale and bias: the parameters' diffs if no addition is needed."""
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
    """A Convolution that sums its output for the BatchNorm behind it, if its plan supports that at no cost.

    Likewise it sums its bottom's gradient for a BatchNorm before it. It recomputes such a bottom in both passes; the
    bottom is not filled.
    """

    def __init__(self, convolution: ConvolutionLayer, norm: FusedNormalisation) -> None:
        super().__init__([convolution])
        self._convolution = convolution
        self._normalisation = norm
        self.source: tuple[FusedNormalisation, Blob] | None = None
        """The preceding normalisation, whose only reader is this layer, and the bottom of that normalisation."""

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


def _wanted_diffs(top: Blobs, gradient_tops: Sequence[bool]) -> list[Array]:
    """Return the diffs of the tops that receive a gradient, or that of the first top, which a program may write."""
    return [blob.diff for blob, comes in zip(top, gradient_tops, strict=True) if comes] or [top[0].diff]
