"""Warp of LiteFlowNet in nets that are read."""

from __future__ import annotations

from caffepy.formats.proto.caffe_pb2 import NetParameter

POSITION_TYPES = ("Eltwise", "Concat", "Slice", "Power", "Bias", "Scale", "Split")
"""Layers whose top holds positions if a bottom does."""


def upgrade(net: NetParameter) -> None:
    """Set ``warp_param.positions`` in Warp layers whose flow is computed from the top of a Grid layer."""
    positions: set[str] = set()
    for layer in net.layer:
        warps = layer.type == "Warp" and len(layer.bottom) > 1 and not layer.warp_param.HasField("positions")
        if warps and layer.bottom[1] in positions:
            layer.warp_param.positions = True
        holds = layer.type == "Grid" or (layer.type in POSITION_TYPES and not positions.isdisjoint(layer.bottom))
        positions = positions.union(layer.top) if holds else positions.difference(layer.top)
