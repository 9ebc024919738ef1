"""Layer fusion: adjacent layers are computed as one.

Fused groups: Convolution or InnerProduct with the ReLU behind it, InnerProduct also with a Sigmoid or TanH; BatchNorm
with the Scale, Eltwise sum, ReLU and Split behind it; another Eltwise sum, or a gate and its sum, with the ReLU and
Split behind it; Reshape, Permute and Reshape that shuffle channels; Permute and Flatten of images that give rows with
channels last. The convolution before a BatchNorm can compute its statistics; the depthwise convolution behind it can
compute its gradient sums. The maximum pooling behind a Convolution and its ReLU computes the ReLU's gradient. Only the
net's schedule changes: the layers and their parameters stay, and each fused layer keeps its members. Results equal the
unfused ones up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Channel, Each, Expression, expression
from caffepy.backend.formulas import plus_rectified, rectified_with_channel, where_positive
from caffepy.backend.types import CHANNELS_LAST, BatchNormState, NormalisedBottom, mask_bytes
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.activation import ActivationLayer
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.inner_product import InnerProductLayer
from caffepy.layers.layer import Blobs, Layer, ScratchBuffer
from caffepy.layers.pooling import PoolingLayer
from caffepy.layers.scale import AxpyLayer, BroadcastLayer, ScaleLayer
from caffepy.layers.tensor import PermuteLayer, transpose_channels
from caffepy.net.graph import Node


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


Chain = list[int]
"""Indices of the nodes to fuse, in order."""


def fuse_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Return the schedule with adjacent layers fused, in a valid order."""
    return Fusion(nodes).run()


class Fusion:
    """One run of the fusion pass.

    Args:
        nodes: the layers in order.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = [Node(n.layer, list(n.bottoms), list(n.tops), n.propagate_down, n.need_backward) for n in nodes]
        self._claimed: set[int] = set()
        self._result: dict[int, Node] = {}

    def run(self) -> list[Node]:
        """Fuse all groups, the last first, so that a sum joins the branch that is computed last."""
        for index in reversed(range(len(self._nodes))):
            if index not in self._claimed and isinstance(self._nodes[index].layer, BatchNormLayer):
                self._fuse_normalisation(index)
        for index, node in enumerate(self._nodes):
            if index not in self._claimed and node.layer.type in ("Convolution", "InnerProduct"):
                self._fuse_activation(index)
            elif index not in self._claimed and node.layer.type == "Reshape":
                self._fuse_shuffle(index)
            elif index not in self._claimed and isinstance(node.layer, PermuteLayer):
                self._fuse_rows(index, node.layer.order)
            elif index not in self._claimed and node.layer.type in ("Axpy", "Scale"):
                self._fuse_gate(index)
            elif index not in self._claimed and node.layer.type == "Eltwise":
                self._fuse_sum(index)
        order = range(len(self._nodes))
        self._add_up_in_convolutions()
        return [self._result.get(i, self._nodes[i]) for i in order if i in self._result or i not in self._claimed]

    # -- readers and writers -------------------------------------------------------------------------

    def _reader(self, index: int, blob: Blob) -> int | None:
        """Return the node that reads `blob` after node `index`: at most one, because Split layers are inserted."""
        for later in range(index + 1, len(self._nodes)):
            if blob in self._nodes[later].bottoms:
                return later
        return None

    def _writer(self, index: int, blob: Blob) -> int | None:
        """Return the last node before `index` that writes `blob`."""
        return next((i for i in range(index - 1, -1, -1) if blob in self._nodes[i].tops), None)

    def _next(self, chain: Chain, types: str) -> int | None:
        """Return the reader of the first top of a chain's last node, if it has this type and may join the chain."""
        candidate = self._reader(chain[-1], self._nodes[chain[-1]].tops[0])
        if candidate is None or candidate in self._claimed or self._nodes[candidate].layer.type != types:
            return None
        # A layer with a loss weight needs its top's diff, which a group overwrites.
        weighted = any(any(self._nodes[i].layer.loss_weights) for i in (*chain, candidate))
        return (
            None
            if weighted or self._blocks_gradient(chain, candidate) or self._shares_parameter_between(chain, candidate)
            else candidate
        )

    def _blocks_gradient(self, chain: Chain, candidate: int) -> bool:
        """Return whether `propagate_down: false` keeps node `candidate`'s gradient from parameters of the chain."""
        if self._nodes[chain[-1]].need_backward or not self._nodes[candidate].need_backward:
            return False
        return any(any(self._nodes[i].layer.propagate_to_params) for i in chain)

    def _shares_parameter_between(self, chain: Chain, candidate: int) -> bool:
        """Return whether a node between the chain and node `candidate` has a parameter of the chain."""
        # Running statistics would be updated in another order, and gradients would count as complete too early.
        names = set().union(*(self._parameter_names(i) for i in chain))
        between = set(range(chain[0] + 1, candidate)) - set(chain)
        return any(not names.isdisjoint(self._parameter_names(i)) for i in between)

    def _parameter_names(self, index: int) -> set[str]:
        """Return names under which a node's parameters are shared."""
        return {spec.name for spec in self._nodes[index].layer.param.param if spec.name}

    def _claim(self, chain: Chain, node: Node) -> None:
        self._claimed.update(chain)
        self._result[chain[-1]] = node

    # -- Reshape + Permute + Reshape -------------------------------------------------------------------

    def _fuse_shuffle(self, index: int) -> None:
        """Fuse a channel shuffle. Unfused, each Reshape of images makes two copies, to logical order and back."""
        chain = [index]
        for kind in ("Permute", "Reshape"):
            following = self._next(chain, kind)
            if following is None:
                return
            chain.append(following)
        nodes = [self._nodes[i] for i in chain]
        fused = FusedShuffle([node.layer for node in nodes], [nodes[0].tops[0], nodes[1].tops[0]])
        if fused.outer(nodes[0].bottoms[0], nodes[2].tops[0]):
            first = nodes[0]
            self._claim(chain, Node(fused, first.bottoms, nodes[2].tops, first.propagate_down, first.need_backward))

    # -- Permute + Flatten or Reshape ------------------------------------------------------------------

    def _fuse_rows(self, index: int, order: tuple[int, ...]) -> None:
        """Fuse a Permute to the memory order of images with the layer that makes rows of its top."""
        reader = next((i for kind in ("Flatten", "Reshape") if (i := self._next([index], kind)) is not None), None)
        if reader is None or order != CHANNELS_LAST.get(len(order)):
            return
        node, last = self._nodes[index], self._nodes[reader]
        if len(last.tops[0].shape) in CHANNELS_LAST:
            return  # the top is an image, whose memory has another order
        fused = FusedRows([node.layer, last.layer], node.tops[0])
        self._claim([index, reader], Node(fused, node.bottoms, last.tops, node.propagate_down, node.need_backward))

    # -- Convolution + ReLU; InnerProduct + ReLU, Sigmoid or TanH ------------------------------------

    def _fuse_activation(self, index: int) -> None:
        node = self._nodes[index]
        reader = self._next([index], "ReLU")
        if reader is None and node.layer.type == "InnerProduct":
            found = (self._next([index], kind) for kind in ("Sigmoid", "TanH"))
            reader = next(
                (i for i in found if i is not None and not self._overwritten(i, self._nodes[i].tops[0])), None
            )
        elif reader is not None and not self._is_plain_relu(reader):
            return
        if reader is None or len(node.tops) != 1:
            return
        if node.layer.type == "InnerProduct" and (len(node.tops[0].shape) != 2 or len(node.layer.blobs) < 2):
            return  # the activation is part of the bias kernel, whose gradient sums are for axis 1
        if isinstance(node.layer, ConvolutionLayer) and node.layer.axis != 1:
            return
        last = self._nodes[reader]
        fused = FusedActivation([node.layer, last.layer])
        self._claim([index, reader], Node(fused, node.bottoms, last.tops, node.propagate_down, node.need_backward))
        if isinstance(node.layer, ConvolutionLayer):
            self._rectify_in_pooling([index, reader], fused)

    def _rectify_in_pooling(self, chain: Chain, source: FusedActivation) -> None:
        """Let the maximum pooling behind a convolution and its ReLU compute the ReLU's gradient."""
        index = self._next(chain, "Pooling")
        if index is None or not self._keeps_sign(index):
            return
        node, layer = self._nodes[index], self._nodes[index].layer
        runs = self._nodes[chain[0]].need_backward and node.need_backward and node.propagate_down[0]
        is_max = isinstance(layer, PoolingLayer) and layer.settings.pool == caffe_pb2.PoolingParameter.MAX
        if is_max and len(node.tops) == 1 and runs:
            self._claim([index], Node(RectifiedPooling(layer, source), node.bottoms, node.tops, [True], True))

    def _is_plain_relu(self, index: int) -> bool:
        """Return whether the layer is max(x, 0) and the sign of its top is intact in the backward pass."""
        return self._nodes[index].layer.param.relu_param.negative_slope == 0 and self._keeps_sign(index)

    def _keeps_sign(self, index: int) -> bool:
        """Return whether the sign of a node's first top is intact in the backward pass."""
        # In-place Dropout keeps the sign of retained elements; the gradient of dropped elements is 0.
        blob = self._nodes[index].tops[0]
        writers = (later for later in self._nodes[index + 1 :] if blob in later.tops)
        return all(writer.layer.type == "Dropout" for writer in writers)

    def _overwritten(self, index: int, blob: Blob) -> bool:
        """Return whether a node after `index` writes into the blob."""
        return any(blob in node.tops for node in self._nodes[index + 1 :])

    # -- Eltwise + ReLU + Split ------------------------------------------------------------------------

    def _fuse_sum(self, index: int) -> None:
        node, chain = self._nodes[index], [index]
        if node.bottoms[0] in node.tops or not self._is_plain_sum(index, node.bottoms[0]):
            return
        self._add_ending(chain, with_sum=False)
        if len(chain) > 1 and self._is_plain_relu(chain[1]):
            fused = FusedSum([self._nodes[i].layer for i in chain], self._gradient_tops(chain[-1]))
            tops = self._nodes[chain[-1]].tops
            self._claim(chain, Node(fused, node.bottoms, tops, node.propagate_down, node.need_backward))

    def _fuse_gate(self, index: int) -> None:
        """Fuse an Axpy, or a Scale by a blob and the sum behind it, with a ReLU."""
        node, chain = self._nodes[index], [index]
        is_scale = isinstance(node.layer, ScaleLayer)
        residual = self._add_ending(chain, with_sum=is_scale)
        bottoms, down = list(node.bottoms), list(node.propagate_down)
        if is_scale:
            if residual is None or len(bottoms) == 1 or node.layer.blobs or bottoms[1].shape == bottoms[0].shape:
                return
            summing, other = self._nodes[residual], self._other_bottom(chain, residual)
            bottoms = [*bottoms[::-1], summing.bottoms[other]]
            down = [*down[::-1], summing.propagate_down[other]]
        relu = next((i for i in chain if self._nodes[i].layer.type == "ReLU"), None)
        need = any(self._nodes[i].need_backward for i in chain)
        if relu is None or not self._is_plain_relu(relu) or need != down[2] or bottoms[1] in node.tops:
            return
        fused = FusedGate([self._nodes[i].layer for i in chain], self._gradient_tops(chain[-1]))
        self._claim(chain, Node(fused, bottoms, self._nodes[chain[-1]].tops, down, need))

    # -- BatchNorm + Scale + Eltwise + ReLU + Split ----------------------------------------------------

    def _fuse_normalisation(self, index: int) -> None:
        norm = self._nodes[index].layer
        assert isinstance(norm, BatchNormLayer)
        if (norm.uses_stored and norm.context.phase == caffe_pb2.TRAIN) or not norm.can_fuse:
            return
        chain, residual = self._find_chain(index)
        source = self._source(index) if len(chain) > 1 else None
        if source is None:
            return
        node = self._nodes[index]
        last = self._nodes[chain[-1]]
        bottoms, down = [source], list(node.propagate_down)
        if residual is not None:
            summing = self._nodes[residual]
            other = self._other_bottom(chain, residual)
            bottoms.append(summing.bottoms[other])
            down.append(summing.propagate_down[other])
        layer = FusedNormalisation([self._nodes[i].layer for i in chain], self._gradient_tops(chain[-1]))
        need = any(self._nodes[i].need_backward for i in chain)
        self._measure_in_convolution(index, layer)
        self._claim(chain, Node(layer, bottoms, last.tops, down, need))

    def _find_chain(self, index: int) -> tuple[Chain, int | None]:
        """Return the longest chain from a BatchNorm that can be fused, and which node of it is the sum."""
        chain = [index]
        norm = self._nodes[index].layer
        assert isinstance(norm, BatchNormLayer)
        scale = self._next(chain, "Scale")
        if scale is not None and not norm.scale_bias and self._is_plain_broadcast(scale):
            chain.append(scale)
        return chain, self._add_ending(chain)

    def _add_ending(self, chain: Chain, with_sum: bool = True) -> int | None:
        """Add the Eltwise sum, the ReLU and the Split behind a chain to it; return the node of the sum, or None."""
        residual = None
        summing = self._next(chain, "Eltwise") if with_sum else None
        if summing is not None and self._is_plain_sum(summing, self._nodes[chain[-1]].tops[0]):
            chain.append(summing)
            residual = summing
        relu = self._next(chain, "ReLU")
        if relu is not None and self._nodes[relu].layer.param.relu_param.negative_slope == 0:
            chain.append(relu)
        split = self._next(chain, "Split")
        if split is not None and len(chain) > 1 and self._is_plain_split(split):
            chain.append(split)
        return residual

    def _other_bottom(self, chain: Chain, residual: int) -> int:
        """Return the index of the sum's bottom that comes from outside the chain."""
        normal = self._nodes[chain[chain.index(residual) - 1]].tops[0]
        return 1 - self._nodes[residual].bottoms.index(normal)

    def _is_plain_split(self, index: int) -> bool:
        layer = self._nodes[index].layer
        return not layer.tops_overwritten and not any(layer.loss_weights)

    def _is_plain_broadcast(self, index: int) -> bool:
        """Return whether a Scale or Bias layer has its own parameters, one element per channel."""
        node = self._nodes[index]
        layer = node.layer
        assert isinstance(layer, BroadcastLayer)
        channels = (node.bottoms[0].shape[1],)
        return len(node.bottoms) == 1 and all(blob.shape == channels for blob in layer.blobs) and layer.axis == 1

    def _is_plain_sum(self, index: int, normal: Blob) -> bool:
        """Return whether the layer adds `normal` and one other blob that it does not overwrite: the group uses its
        diff."""
        node = self._nodes[index]
        param = node.layer.param.eltwise_param
        plain = param.operation == caffe_pb2.EltwiseParameter.SUM and all(c == 1 for c in param.coeff)
        others = [blob for blob in node.bottoms if blob is not normal]
        return plain and len(node.bottoms) == 2 and len(others) == 1 and others[0] not in node.tops

    def _source(self, index: int) -> Blob | None:
        """Return the BatchNorm's bottom for the backward pass: a new blob if a later layer overwrites it."""
        # All earlier layers that use the blob are moved to the new one, so that in-place layers stay in place. Return
        # None and change nothing if the first of them cannot write to another blob.
        blob = self._nodes[index].bottoms[0]
        if not self._overwritten(index - 1, blob):
            return blob
        users = [i for i, node in enumerate(self._nodes[:index]) if blob in node.bottoms or blob in node.tops]
        if not users or not self._nodes[users[0]].bottoms or not self._claimed.isdisjoint(users):
            return None
        if not self._nodes[index].propagate_down[0] and any(self._nodes[i].need_backward for i in users):
            return None  # their backward pass reads the diff that a later layer wrote to the blob
        hidden = Blob(blob.backend, blob.shape, f"{blob.name} before {self._nodes[index].layer.name}", blob.dtype)
        lists = [self._nodes[index].bottoms]
        for i in users:
            lists += [self._nodes[i].bottoms, self._nodes[i].tops]
        for blobs in lists:
            blobs[:] = [hidden if one is blob else one for one in blobs]
        return hidden

    def _gradient_tops(self, last: int) -> list[bool]:
        """Return for each top of the last node whether it receives a gradient."""
        result = []
        for blob in self._nodes[last].tops:
            reader = self._reader(last, blob)
            node = None if reader is None else self._nodes[reader]
            result.append(node is not None and node.need_backward and node.propagate_down[node.bottoms.index(blob)])
        return result

    def _measure_in_convolution(self, index: int, norm: FusedNormalisation) -> None:
        writer = self._writer(index, self._nodes[index].bottoms[0])
        if writer is None or writer in self._claimed or norm.uses_stored:
            return
        node = self._nodes[writer]
        first = node.layer
        if isinstance(first, ConvolutionLayer) and first.axis == 1 and len(node.tops) == 1 and first.bias is None:
            measured = MeasuredConvolution(first, norm)
            self._claim([writer], Node(measured, node.bottoms, node.tops, node.propagate_down, node.need_backward))

    def _add_up_in_convolutions(self) -> None:
        """Tell each convolution the normalisation directly before it, if the convolution is its only reader."""
        for index, node in self._result.items():
            source = self._result.get(index - 1)
            if source is None or not isinstance(node.layer, MeasuredConvolution):
                continue
            norm, wanted = source.layer, source.need_backward and source.propagate_down[0]
            if isinstance(norm, FusedNormalisation) and norm.is_plain and source.tops == node.bottoms and wanted:
                node.layer.source, norm.reader = (norm, source.bottoms[0]), node.layer
