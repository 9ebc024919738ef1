"""What the layer types of this family become in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import TORCH, TorchView


@TORCH.exports("ChannelNorm", form="square, sum, sqrt")
def channel_norm(code: TorchView) -> str:
    return f"{code.x}.square().sum(1, keepdim=True).sqrt()"
