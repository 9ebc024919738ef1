"""Folding for TEST nets: layers behind a convolution are folded into its weights and epilogue.

A Convolution absorbs the BatchNorm, Scale and Bias layers behind it, then an Eltwise sum, a ReLU and a Split. The
remaining layers are fused as in training.

With stored statistics BatchNorm is y = x * factor + term for each channel, and so are Scale and Bias. Then weights' =
weights * factor and bias' = bias * factor + term give the same result in one convolution; its epilogue adds the
residual and applies the ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Convolution, Each, expression
from caffepy.backend.formulas import product, product_plus, product_with_channel, total
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import Blobs, Layer
from caffepy.layers.scale import BiasLayer, BroadcastLayer, ScaleLayer
from caffepy.net.fuse import Chain, Fusion
from caffepy.net.fused_layers import FusedLayer
from caffepy.net.graph import Node


@expression
def after_statistics(factor: Each, term: Each, mean: Each, inverse: Each, scale: Each, bias: Each) -> tuple[Each, Each]:
    return factor * inverse * scale, (term - mean) * inverse * scale + bias


class FoldedConvolution(FusedLayer):
    """y = max(weights' * x + bias' + residual, 0), with one top for each reader; forward only.

    A Convolution, then any of BatchNorm with stored statistics, Scale and Bias, then optionally an Eltwise sum, a ReLU
    and a Split; or the Convolution alone. Bottoms: x, and the residual if there is a sum.

    Args:
        members: the layers, in the order in which they would be computed.
    """

    has_backward = False

    def __init__(self, members: Sequence[Layer]) -> None:
        super().__init__(members)
        first = members[0]
        assert isinstance(first, ConvolutionLayer)
        self._convolution = first
        self._factors = [m for m in members if isinstance(m, BatchNormLayer | ScaleLayer | BiasLayer)]
        types = {member.type for member in members}
        self._adds, self._relu = "Eltwise" in types, "ReLU" in types
        outputs = (first.blobs[0].shape[0],)
        self._factor, self._term = self.backend.zeros(outputs), self.backend.zeros(outputs)
        self._weights: Array | None = None
        self._kept: tuple[Convolution, Array] | None = None
        """The plan that stores the folded weights in its own layout, and the learned weights they stand for."""

    @property
    def folded(self) -> list[Array]:
        """The arrays that `fold` computes and the layer keeps."""
        return [self._factor, self._term] + ([] if self._weights is None else [self._weights])

    @property
    def folded_layers(self) -> list[Layer]:
        """The layers whose parameters only `fold` reads."""
        return [self._convolution, *self._factors] if self._factors else []

    def fold(self) -> None:
        """Compute the folded weights and bias. Called whenever the parameters have changed."""
        if not self._factors:
            self._convolution.keep_weights(self._convolution.weights())
            return
        factor, term, bias = self._factor, self._term, self._convolution.bias
        self.backend.fill(factor, 1)
        if bias is None:
            self.backend.fill(term, 0)
        else:
            self.backend.copy(bias, term)
        for layer in self._factors:
            self._apply(layer)
        self._fold_weights()

    def _fold_weights(self) -> None:
        """Fold the factor into the weights; drop the folded array if the plan keeps its own copy."""
        convolution, learned = self._convolution, self._convolution.blobs[0].data
        weights = self._weights
        if weights is None:
            weights = self.backend.zeros(convolution.blobs[0].shape, convolution.dtype)
        self.backend.apply(product_with_channel, (convolution.blobs[0].data, self._factor), (weights,), axis=0)
        kept = convolution.keep_weights(weights, learned)
        self._weights, self._kept = (None, (convolution.plan, learned)) if kept else (weights, None)

    @property
    def _is_outdated(self) -> bool:
        """Whether a new shape has replaced the plan, or the parameters have new memory."""
        plan, learned = self._kept or (None, None)
        return plan is not None and (
            plan is not self._convolution.plan or learned is not self._convolution.blobs[0].data
        )

    def _apply(self, layer: BatchNormLayer | ScaleLayer | BiasLayer) -> None:
        """Update factor and term by one layer."""
        factor, term = self._factor, self._term
        if isinstance(layer, BatchNormLayer):
            n = layer.normalisation()
            self.backend.batch_norm_load(n)
            inputs = (factor, term, n.mean, n.inverse, n.scale, n.bias)
            self.backend.apply(after_statistics, inputs, (factor, term))
        elif isinstance(layer, BiasLayer):
            self.backend.apply(total, (term, layer.blobs[0].data), (term,))
        else:
            scale = layer.blobs[0].data
            self.backend.apply(product, (factor, scale), (factor,))
            if len(layer.blobs) > 1:
                self.backend.apply(product_plus, (term, scale, layer.blobs[1].data), (term,))
            else:
                self.backend.apply(product, (term, scale), (term,))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._convolution.reshape(bottom[:1], top[:1])
        if self._adds and bottom[1].shape != top[0].shape:
            raise self.shape_error("the sum's bottoms must have one shape", top[0], bottom[1])
        for blob in top[1:]:
            blob.reshape(top[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._is_outdated:
            self._fold_weights()
        bias = self._term if self._factors else self._convolution.bias
        residual = bottom[1].data if self._adds else None
        self._convolution.convolve(bottom[0], top[0], self._weights, bias, residual, self._relu)
        for blob in top[1:]:
            blob.bind(data=top[0].data)


FACTORS = ("BatchNorm", "BN", "Scale", "Bias")
"""Layers that apply a factor and a term to each channel."""


def fold_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Return the same forward pass with neighbouring layers folded and fused, in an order in which it can be done."""
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
        """Return the BatchNorm's bottom, even if a later layer overwrites it: there is no backward pass."""
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
        """Return a convolution and those behind it that multiply and add by channel."""
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
            return layer.uses_stored and layer.can_fuse
        return isinstance(layer, BroadcastLayer) and self._is_plain_broadcast(index)
