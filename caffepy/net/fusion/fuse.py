"""Rewrites a net's list of layers so that neighbours are computed as one.

Owns which layers go together: Convolution or InnerProduct with the ReLU behind it, InnerProduct also with a Sigmoid or
TanH; BatchNorm with the Scale, Eltwise sum, ReLU and Split behind it, its statistics added up by the convolution before
it, its gradient by the depthwise convolution right behind it; Reshape, Permute and Reshape that shuffle channels. The
layers themselves stay as they are, with their parameters; only the net's schedule changes. `fused.py` has the fused
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.blob import Blob
from caffepy.layers.normalization.batch_norm import BatchNormLayer
from caffepy.layers.normalization.scale import BroadcastLayer
from caffepy.layers.vision.convolution import ConvolutionLayer
from caffepy.net.fusion.fused import FusedActivation, FusedNormalisation, FusedShuffle, MeasuredConvolution
from caffepy.net.wiring import Node
from caffepy.proto import caffe_pb2

Chain = list[int]
"""Indices of nodes that are to be computed as one, in order."""


def fuse_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The same work with neighbouring layers fused, in an order in which it can be done."""
    return Fusion(nodes).run()


class Fusion:
    """One rewrite.

    Args:
        nodes: the layers in order.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = [Node(n.layer, list(n.bottoms), list(n.tops), n.propagate_down, n.need_backward) for n in nodes]
        self._claimed: set[int] = set()
        self._result: dict[int, Node] = {}

    def run(self) -> list[Node]:
        """Find the groups, the last ones first, so that a sum goes to the branch that is computed last."""
        for index in reversed(range(len(self._nodes))):
            if index not in self._claimed and self._nodes[index].layer.type == "BatchNorm":
                self._fuse_normalisation(index)
        for index, node in enumerate(self._nodes):
            if index not in self._claimed and node.layer.type in ("Convolution", "InnerProduct"):
                self._fuse_activation(index)
            elif index not in self._claimed and node.layer.type == "Reshape":
                self._fuse_shuffle(index)
        order = range(len(self._nodes))
        self._add_up_in_convolutions()
        return [self._result.get(i, self._nodes[i]) for i in order if i in self._result or i not in self._claimed]

    # -- who reads what ------------------------------------------------------------------------------

    def _reader(self, index: int, blob: Blob) -> int | None:
        """The node that reads what node `index` left in `blob`: there is at most one, thanks to the Split layers."""
        for later in range(index + 1, len(self._nodes)):
            if blob in self._nodes[later].bottoms:
                return later
        return None

    def _writer(self, index: int, blob: Blob) -> int | None:
        """The node whose values node `index` finds in `blob`."""
        return next((i for i in range(index - 1, -1, -1) if blob in self._nodes[i].tops), None)

    def _next(self, chain: Chain, types: str) -> int | None:
        """The node behind the first top of a chain's last node, if it is of that type and may join the chain."""
        candidate = self._reader(chain[-1], self._nodes[chain[-1]].tops[0])
        if candidate is None or candidate in self._claimed or self._nodes[candidate].layer.type != types:
            return None
        # What has a loss weight keeps its top's diff, which a group overwrites.
        weighted = any(any(self._nodes[i].layer.loss_weights) for i in (*chain, candidate))
        return (
            None
            if weighted or self._blocks_gradient(chain, candidate) or self._shares_parameter_between(chain, candidate)
            else candidate
        )

    def _blocks_gradient(self, chain: Chain, candidate: int) -> bool:
        """Whether `propagate_down: false` keeps node `candidate`'s gradient from parameters of the chain."""
        if self._nodes[chain[-1]].need_backward or not self._nodes[candidate].need_backward:
            return False
        return any(any(self._nodes[i].layer.propagate_to_params) for i in chain)

    def _shares_parameter_between(self, chain: Chain, candidate: int) -> bool:
        """Whether a node between the chain and node `candidate` has a parameter of the chain.

        Running statistics would be updated in another order, and gradients would count as complete too early.
        """
        names = set().union(*(self._parameter_names(i) for i in chain))
        between = set(range(chain[0] + 1, candidate)) - set(chain)
        return any(not names.isdisjoint(self._parameter_names(i)) for i in between)

    def _parameter_names(self, index: int) -> set[str]:
        """Names under which a node's parameters are shared."""
        return {spec.name for spec in self._nodes[index].layer.param.param if spec.name}

    def _claim(self, chain: Chain, node: Node) -> None:
        self._claimed.update(chain)
        self._result[chain[-1]] = node

    # -- Reshape + Permute + Reshape -------------------------------------------------------------------

    def _fuse_shuffle(self, index: int) -> None:
        """Channels that change places: each Reshape of images would be two copies, by way of the logical order."""
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
            return  # the activation is part of the pass that adds the bias, and its gradient's sums are for axis 1
        if isinstance(node.layer, ConvolutionLayer) and node.layer.axis != 1:
            return
        last = self._nodes[reader]
        fused = FusedActivation([node.layer, last.layer])
        self._claim([index, reader], Node(fused, node.bottoms, last.tops, node.propagate_down, node.need_backward))

    def _is_plain_relu(self, index: int) -> bool:
        """Whether max(x, 0), and its sign can still be seen in the backward pass."""
        node = self._nodes[index]
        if node.layer.param.relu_param.negative_slope != 0:
            return False
        # Dropout in place leaves the sign of what it keeps, and the gradient of what it drops is 0 anyway.
        writers = (later for later in self._nodes[index + 1 :] if node.tops[0] in later.tops)
        return all(writer.layer.type == "Dropout" for writer in writers)

    def _overwritten(self, index: int, blob: Blob) -> bool:
        """Whether a node from `index` on, itself not counted, writes into the blob."""
        return any(blob in node.tops for node in self._nodes[index + 1 :])

    # -- BatchNorm + Scale + Eltwise + ReLU + Split ----------------------------------------------------

    def _fuse_normalisation(self, index: int) -> None:
        norm = self._nodes[index].layer
        assert isinstance(norm, BatchNormLayer)
        if norm.uses_stored and norm.context.phase == caffe_pb2.TRAIN:
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
        """The nodes from a BatchNorm on that can be one, and which of them is the sum."""
        chain = [index]
        norm = self._nodes[index].layer
        assert isinstance(norm, BatchNormLayer)
        scale = self._next(chain, "Scale")
        if scale is not None and not norm.scale_bias and self._is_plain_broadcast(scale):
            chain.append(scale)
        return chain, self._add_ending(chain)

    def _add_ending(self, chain: Chain, with_sum: bool = True) -> int | None:
        """Add the Eltwise sum, the ReLU and the Split behind a chain to it; which node is the sum, if there is one."""
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
        """Which bottom of a chain's sum comes from outside."""
        normal = self._nodes[chain[chain.index(residual) - 1]].tops[0]
        return 1 - self._nodes[residual].bottoms.index(normal)

    def _is_plain_split(self, index: int) -> bool:
        layer = self._nodes[index].layer
        return not layer.tops_overwritten and not any(layer.loss_weights)

    def _is_plain_broadcast(self, index: int) -> bool:
        """Whether a Scale or Bias layer has one number of its own for each channel."""
        node = self._nodes[index]
        layer = node.layer
        assert isinstance(layer, BroadcastLayer)
        channels = (node.bottoms[0].shape[1],)
        return len(node.bottoms) == 1 and all(blob.shape == channels for blob in layer.blobs) and layer.axis == 1

    def _is_plain_sum(self, index: int, normal: Blob) -> bool:
        """Whether the sum of `normal` and one other blob that it does not overwrite: that one's diff is the group's."""
        node = self._nodes[index]
        param = node.layer.param.eltwise_param
        plain = param.operation == caffe_pb2.EltwiseParameter.SUM and all(c == 1 for c in param.coeff)
        others = [blob for blob in node.bottoms if blob is not normal]
        return plain and len(node.bottoms) == 2 and len(others) == 1 and others[0] not in node.tops

    def _source(self, index: int) -> Blob | None:
        """Where the BatchNorm finds its bottom in the backward pass: a blob of its own if a later layer overwrites it.

        All layers before that use the blob then use the other one, so that those which work in place still do. None if
        the first of them cannot write anywhere else; nothing is changed then.
        """
        blob = self._nodes[index].bottoms[0]
        if not self._overwritten(index - 1, blob):
            return blob
        users = [i for i, node in enumerate(self._nodes[:index]) if blob in node.bottoms or blob in node.tops]
        if not users or not self._nodes[users[0]].bottoms or not self._claimed.isdisjoint(users):
            return None
        if not self._nodes[index].propagate_down[0] and any(self._nodes[i].need_backward for i in users):
            return None  # they find in the blob's diff what a later layer left there
        hidden = Blob(blob.backend, blob.shape, f"{blob.name} before {self._nodes[index].layer.name}", blob.dtype)
        lists = [self._nodes[index].bottoms]
        for i in users:
            lists += [self._nodes[i].bottoms, self._nodes[i].tops]
        for blobs in lists:
            blobs[:] = [hidden if one is blob else one for one in blobs]
        return hidden

    def _gradient_tops(self, last: int) -> list[bool]:
        """For each top of the last node whether a gradient comes back through it."""
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
        """Tell convolutions which normalisation stands right before them and has no other reader."""
        for index, node in self._result.items():
            source = self._result.get(index - 1)
            if source is None or not isinstance(node.layer, MeasuredConvolution):
                continue
            norm, wanted = source.layer, source.need_backward and source.propagate_down[0]
            if isinstance(norm, FusedNormalisation) and norm.is_plain and source.tops == node.bottoms and wanted:
                node.layer.source, norm.reader = (norm, source.bottoms[0]), node.layer
