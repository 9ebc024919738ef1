"""Blobs that share memory in Caffe: a program writes to one of them, and reads that from the other.

Reshape, and Concat and Slice of a single blob, share when Caffe shapes them, before any pass; Flatten, Split and others
when they run. Their `forward` shares here too, except where images, which are channels last in memory, forbid it: then
Reshape and Flatten copy. The program sees the original in place of such a copy, and passes refresh the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from caffepy.backend import Array
from caffepy.backend.layout import address
from caffepy.layers.layer import Layer
from caffepy.net import Net
from caffepy.net.graph import Node


class SharedMemory:
    """The blobs of a net that share memory in Caffe.

    Args:
        net: the net, which has not run yet.
    """

    def __init__(self, net: Net) -> None:
        self._at_setup = [node for node in net.nodes if node.layer.shares_at_setup()]
        self._copying = [node for node in net.nodes if type(node.layer).copied is not Layer.copied]
        self._share(self._at_setup)

    def share_again(self) -> None:
        """Share what Caffe shares when it shapes the layers. Called after a reshape of the net."""
        self._share([node for node in self._at_setup if not node.layer.tops_overwritten])

    def _share(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            with node.named_errors():
                node.layer.forward(node.bottoms, node.tops)

    def refresh(self) -> None:
        """Bring copies up to date. Called where a pass begins behind the layers that make them."""
        for node, _, _ in self._copies():
            node.layer.forward(node.bottoms, node.tops)

    def original(self, array: Array) -> Array:
        """Return the array that `array` is a copy of; without one, `array`."""
        for _, source, target in self._copies():
            if address(target) == address(array) and target.size == array.size:
                return self.original(source)
        return array

    def _copies(self) -> Iterator[tuple[Node, Array, Array]]:
        """Yield the layers that copied and their arrays, in the net's order."""
        for node in self._copying:
            if (pair := node.layer.copied(node.bottoms, node.tops)) is not None:
                yield node, *pair
