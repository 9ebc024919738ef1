"""Rewrites a TEST net's list of layers: what follows a convolution is folded into it.

Owns which layers go together: a Convolution with the BatchNorm, Scale and Bias layers behind it, then an Eltwise sum, a
ReLU and a Split. What is left is fused as in training. `folded.py` has the folded layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.blob import Blob
from caffepy.layers.normalization.batch_norm import BatchNormLayer
from caffepy.layers.normalization.scale import BroadcastLayer
from caffepy.layers.vision.convolution import ConvolutionLayer
from caffepy.net.fusion.folded import FoldedConvolution
from caffepy.net.fusion.fuse import Chain, Fusion
from caffepy.net.wiring import Node

FACTORS = ("BatchNorm", "Scale", "Bias")
"""Layers that multiply each channel by a number and add one to it."""


def fold_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The same forward pass with neighbouring layers folded and fused, in an order in which it can be done."""
    return Folding(nodes).run()


class Folding(Fusion):
    """One rewrite.

    Args:
        nodes: the layers in order.
    """

    def run(self) -> list[Node]:
        """Fold the convolutions, the last ones first, so that a sum goes to the branch that is computed last."""
        for index in reversed(range(len(self._nodes))):
            if index not in self._claimed:
                self._fold(index)
        return super().run()

    def _source(self, index: int) -> Blob | None:
        """The BatchNorm's bottom, even if a later layer overwrites it: there is no backward pass."""
        return self._nodes[index].bottoms[0]

    def _fold(self, index: int) -> None:
        node = self._nodes[index]
        layer = node.layer
        if not isinstance(layer, ConvolutionLayer) or layer.axis != 1 or len(node.tops) != 1:
            return
        chain = self._factors(index)
        bottoms = list(node.bottoms)
        residual = self._add_ending(chain, with_sum=len(node.tops[0].shape) > 2)
        if residual is not None:
            bottoms.append(self._nodes[residual].bottoms[self._other_bottom(chain, residual)])
        folded = FoldedConvolution([self._nodes[i].layer for i in chain])
        self._claim(chain, Node(folded, bottoms, self._nodes[chain[-1]].tops, [False] * len(bottoms)))

    def _factors(self, index: int) -> Chain:
        """A convolution and those behind it that multiply and add by channel."""
        chain = [index]
        while True:
            found = next((n for n in (self._next(chain, kind) for kind in FACTORS) if n is not None), None)
            if found is None or not self._is_factor(found):
                return chain
            chain.append(found)

    def _is_factor(self, index: int) -> bool:
        node = self._nodes[index]
        layer = node.layer
        if isinstance(layer, BatchNormLayer):
            return layer.uses_stored
        return isinstance(layer, BroadcastLayer) and self._is_plain_broadcast(index)
