"""Layers that nets of other people have and those of models/ have not, as PyTorch modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from peers.layers import Described, maker


@maker("ReLU6")
def relu6(layer: Described) -> nn.Module:
    """In place where the prototxt has it so."""
    return nn.ReLU6(layer["bottoms"] == layer["tops"])


@maker("PReLU")
def prelu(layer: Described) -> nn.Module:
    """PyTorch's, with one slope or one for each channel."""
    shape = layer["parameters"][0]
    return nn.PReLU(shape[0] if shape else 1)


@maker("TanH", "ELU", "Swish", "HardSwish", "AbsVal")
def activation(layer: Described) -> nn.Module:
    """PyTorch's."""
    made: dict[str, Any] = {"TanH": nn.Tanh, "ELU": nn.ELU, "Swish": nn.SiLU, "HardSwish": nn.Hardswish}
    return Absolute() if layer["type"] == "AbsVal" else made[layer["type"]]()


class Absolute(nn.Module):
    """|x|."""

    def forward(self, x: Any) -> Any:
        return x.abs()


@maker("Power")
class Power(nn.Module):
    """(shift + scale * x) ^ power, without what has no effect."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.s = layer["settings"]

    def forward(self, x: Any) -> Any:
        s = self.s
        x = x * s["scale"] if s["scale"] != 1 else x
        x = x + s["shift"] if s["shift"] else x
        return x ** s["power"] if s["power"] != 1 else x


@maker("Scale", "Bias")
class Broadcast(nn.Module):
    """A product, or a sum, with a blob or parameter that has some of the axes."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        s, bottoms = layer["settings"], layer["bottom_shapes"]
        self.product, shapes = layer["type"] == "Scale", layer["parameters"]
        own = len(bottoms) == 1
        operand = shapes[0] if own else bottoms[1]
        rest = len(bottoms[0]) - s["axis"] - len(operand)
        self.shape = (1,) * s["axis"] + tuple(operand) + (1,) * rest
        self.weight = nn.Parameter(torch.ones(shapes[0])) if own else None
        self.bias = nn.Parameter(torch.zeros(shapes[-1])) if self.product and s["bias"] else None
        if not own:
            self.shape = tuple(-1 if index == 0 and s["axis"] == 0 else size for index, size in enumerate(self.shape))

    def forward(self, x: Any, operand: Any = None) -> Any:
        operand = (self.weight if operand is None else operand).reshape(self.shape)
        if not self.product:
            return x + operand
        return x * operand if self.bias is None else torch.addcmul(self.bias.view(self.shape), x, operand)


@maker("Axpy")
class Axpy(nn.Module):
    """a * x + b with one factor for each channel of each image."""

    def __init__(self, layer: Described) -> None:
        super().__init__()

    def forward(self, a: Any, x: Any, b: Any) -> Any:
        return torch.addcmul(b, a.view(*x.shape[:2], 1, 1), x)


@maker("ShuffleChannel")
class ShuffleChannel(nn.Module):
    """PyTorch's."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.group = layer["settings"]["group"]

    def forward(self, x: Any) -> Any:
        return F.channel_shuffle(x, self.group)


@maker("Upsample", "Interp")
class Larger(nn.Module):
    """By the mask of MAX pooling, by repeating pixels, or bilinear with the corners where they are."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.size, self.bilinear = layer["shapes"][0][2:], layer["type"] == "Interp"

    def forward(self, x: Any, mask: Any = None) -> Any:
        if mask is not None:
            return F.max_unpool2d(x, mask, 2, 2, 0, self.size)
        if self.bilinear:
            return F.interpolate(x, self.size, mode="bilinear", align_corners=True)
        return F.interpolate(x, self.size, mode="nearest")


@maker("ROIPooling")
class RoiPooling(nn.Module):
    """One adaptive pooling a region: PyTorch has no layer of its own for that."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.size, self.scale = tuple(layer["shapes"][0][2:]), layer["settings"]["scale"]

    def forward(self, x: Any, regions: Any) -> Any:
        if torch._guards.detect_fake_mode((x,)) is not None:  # shapes are being compared
            return x.new_empty((len(regions), x.shape[1], *self.size))
        images = regions[:, 0].long().tolist()
        corners = (regions[:, 1:] * self.scale + 0.5).floor().long().tolist()
        parts = []
        for image, (left, top, right, bottom) in zip(images, corners, strict=True):
            parts.append(F.adaptive_max_pool2d(x[image, :, top : bottom + 1, left : right + 1], self.size))
        return torch.stack(parts)


@maker("SmoothL1Loss", "L1Loss")
class DistanceLoss(nn.Module):
    """Of all elements, over the number of samples."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.smooth = layer["type"] == "SmoothL1Loss"

    def forward(self, x: Any, target: Any) -> Any:
        loss = F.smooth_l1_loss if self.smooth else F.l1_loss
        return loss(x, target.view(x.shape), reduction="sum") / x.shape[0]
