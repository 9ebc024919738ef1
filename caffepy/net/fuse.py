"""Layer fusion: adjacent layers are computed as one.

Fused groups: Convolution or InnerProduct with the ReLU behind it, InnerProduct also with a Sigmoid or TanH; BatchNorm
with the Scale, Eltwise sum, ReLU and Split behind it; another Eltwise sum, or a gate and its sum, with the ReLU and
Split behind it; Reshape, Permute and Reshape that shuffle channels; Permute and Flatten of images that give rows with
channels last. The convolution before a BatchNorm can compute its statistics; the depthwise convolution behind it can
compute its gradient sums. The maximum pooling behind a Convolution and its ReLU computes the ReLU's gradient. Only the
net's schedule changes: the layers and their parameters stay. `fused_layers.py` computes the groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend.types import CHANNELS_LAST
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.pooling import PoolingLayer
from caffepy.layers.scale import BroadcastLayer, ScaleLayer
from caffepy.layers.tensor import PermuteLayer
from caffepy.net.fused_layers import (
    FusedActivation,
    FusedGate,
    FusedNormalisation,
    FusedRows,
    FusedShuffle,
    FusedSum,
    MeasuredConvolution,
    RectifiedPooling,
)
from caffepy.net.graph import Node

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
