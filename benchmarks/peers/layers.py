"""Caffe's layers as PyTorch modules, for Pythons that have PyTorch alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Described = dict[str, Any]
MAKERS: dict[str, Callable[[Described], Any]] = {}
"""A module for a described layer, by its type; it takes the bottoms and gives the top."""


def maker(*types: str) -> Callable[[Any], Any]:
    """Register a function or a class for types of layers."""

    def register(function: Any) -> Any:
        MAKERS.update(dict.fromkeys(types, function))
        return function

    return register


@maker("Convolution", "DepthwiseConvolution", "Deconvolution")
def convolution(layer: Described) -> nn.Module:
    """A convolution over as many axes as its kernel has."""
    s, axes = layer["settings"], len(layer["settings"]["kernel"]) - 1
    transposed = layer["type"] == "Deconvolution"
    kinds: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if transposed:
        kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    made: nn.Module = kinds[axes](
        s["channels"],
        s["outputs"],
        tuple(s["kernel"]),
        tuple(s["stride"]),
        tuple(s["pad"]),
        dilation=tuple(s["dilation"]),
        groups=s["group"],
        bias=s["bias"],
    )
    return made


@maker("Pooling")
class Pooling(nn.Module):
    """Windows as Caffe counts them: the last may end past the border, and the average counts padding."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        s = layer["settings"]
        self.masked = len(layer["shapes"]) > 1
        self.is_max, whole = s["max"], s["kernel"] == layer["bottom_shapes"][0][2:] and not any(s["pad"])
        self.whole = whole and layer["shapes"][0][2:] == [1, 1]
        self.window = (tuple(s["kernel"]), tuple(s["stride"]), tuple(s["pad"]))
        self.ceil = s["ceil"]

    def forward(self, x: Any) -> Any:
        if self.whole:
            return (F.adaptive_max_pool2d if self.is_max else F.adaptive_avg_pool2d)(x, 1)
        if self.masked:
            return F.max_pool2d(x, *self.window, ceil_mode=self.ceil, return_indices=True)
        return (F.max_pool2d if self.is_max else F.avg_pool2d)(x, *self.window, ceil_mode=self.ceil)


@maker("LRN")
class Lrn(nn.Module):
    """Over channels PyTorch's own; within a channel by the average of squares."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.s = layer["settings"]

    def forward(self, x: Any) -> Any:
        s = self.s
        if not s["within"]:
            return F.local_response_norm(x, s["size"], s["alpha"], s["beta"], s["k"])
        return x * (1 + s["alpha"] * F.avg_pool2d(x * x, s["size"], 1, s["size"] // 2)) ** -s["beta"]


@maker("InnerProduct")
class InnerProduct(nn.Module):
    """A fully connected layer over all axes from one on."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        s, shape = layer["settings"], layer["bottom_shapes"][0]
        self.axis, self.flattens = s["axis"], len(shape) > s["axis"] + 1
        self.linear = nn.Linear(math.prod(shape[s["axis"] :]), s["outputs"], s["bias"])

    def forward(self, x: Any) -> Any:
        return self.linear(x.flatten(self.axis) if self.flattens else x)


@maker("ReLU")
def relu(layer: Described) -> nn.Module:
    """In place where the prototxt has it so."""
    slope, in_place = layer["settings"]["slope"], layer["bottoms"] == layer["tops"]
    return nn.LeakyReLU(slope, in_place) if slope else nn.ReLU(in_place)


@maker("Eltwise")
class Eltwise(nn.Module):
    """Sum, product or maximum of several blobs."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.operation = layer["settings"]["operation"]
        self.coeff = layer["settings"]["coeff"]

    def forward(self, first: Any, *others: Any) -> Any:
        total = first * self.coeff[0] if self.coeff else first
        for index, other in enumerate(others, 1):
            if self.operation == "SUM":
                total = total + (other * self.coeff[index] if self.coeff else other)
            else:
                total = total * other if self.operation == "PROD" else torch.maximum(total, other)
        return total


class Shaped(nn.Module):
    """Layers that only move numbers."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.kind, self.s, self.shapes = layer["type"], layer["settings"], layer["shapes"]

    def forward(self, *x: Any) -> Any:
        if self.kind == "Concat":
            return torch.cat(x, self.s["axis"])
        if self.kind == "Slice":
            axis = self.s["axis"]
            return torch.split(x[0], [shape[axis] for shape in self.shapes], axis)
        if self.kind == "Permute":
            return x[0].permute(self.s["order"])
        if self.kind == "Flatten":
            return x[0].flatten(self.s["axis"], self.s["end"])
        return x[0].reshape(self.shapes[0])


for _type in ("Concat", "Slice", "Permute", "Flatten", "Reshape"):
    MAKERS[_type] = Shaped


@maker("Crop")
class Crop(nn.Module):
    """The part of the first bottom that has the second's size."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        offsets, shape = layer["settings"]["offsets"], layer["shapes"][0]
        self.parts = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))

    def forward(self, x: Any, reference: Any) -> Any:
        return x[self.parts]


@maker("Dropout")
def dropout(layer: Described) -> nn.Module:
    """PyTorch's."""
    return nn.Dropout(layer["settings"]["ratio"])


@maker("Sigmoid")
def sigmoid(layer: Described) -> nn.Module:
    """PyTorch's."""
    return nn.Sigmoid()


@maker("Softmax")
def softmax(layer: Described) -> nn.Module:
    """PyTorch's."""
    return nn.Softmax(layer["settings"]["axis"])


@maker("Normalize")
class Normalize(nn.Module):
    """Each position's channels over their length, times a learned factor a channel."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.eps = layer["settings"]["eps"]
        self.weight = nn.Parameter(torch.ones(layer["parameters"][0]))

    def forward(self, x: Any) -> Any:
        length = torch.sqrt((x * x).sum(1, keepdim=True) + self.eps)
        return x / length * self.weight.view(-1, 1, 1).to(x.dtype)


@maker("Embed")
def embed(layer: Described) -> nn.Module:
    """PyTorch's."""
    return nn.Embedding(layer["settings"]["words"], layer["settings"]["outputs"])


@maker("LSTM")
class Lstm(nn.Module):
    """PyTorch's LSTM; a static input is put behind the numbers of every step.

    The blob that says where sequences go on is not read: the benchmarks' sequences begin at the first step.
    """

    def __init__(self, layer: Described) -> None:
        super().__init__()
        steps, outputs = layer["bottom_shapes"][0], layer["settings"]["outputs"]
        static = math.prod(layer["bottom_shapes"][2][1:]) if layer["settings"]["static"] else 0
        self.width = math.prod(steps[2:])
        self.lstm = nn.LSTM(self.width + static, outputs)
        nn.init.zeros_(self.lstm.bias_hh_l0)
        self.lstm.bias_hh_l0.requires_grad_(False)

    def forward(self, x: Any, begins: Any, static: Any = None) -> Any:
        x = x.flatten(2)
        if static is not None:
            x = torch.cat((x, static.flatten(1).expand(x.shape[0], -1, -1)), 2)
        return self.lstm(x)[0]


# -- losses -----------------------------------------------------------------------------------------------


@maker("SoftmaxWithLoss")
class SoftmaxLoss(nn.Module):
    """Cross entropy, divided as the prototxt says."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        s, shape = layer["settings"], layer["bottom_shapes"][0]
        self.axis, self.classes = s["axis"], shape[s["axis"]]
        self.ignored = -100 if s["ignored"] is None else s["ignored"]
        images, pixels = math.prod(shape[: s["axis"]]), math.prod(shape[s["axis"] + 1 :])
        self.divisor = {"VALID": 0, "FULL": images * pixels, "BATCH_SIZE": images, "NONE": 1}[s["divisor"]]

    def forward(self, x: Any, labels: Any) -> Any:
        if self.axis == 1:
            labels = labels.view(x.shape[0], *x.shape[2:])
        else:
            x, labels = x.reshape(-1, self.classes), labels.flatten()
        if not self.divisor:
            return F.cross_entropy(x, labels, ignore_index=self.ignored)
        return F.cross_entropy(x, labels, ignore_index=self.ignored, reduction="sum") / self.divisor


@maker("SigmoidCrossEntropyLoss", "EuclideanLoss")
class ElementLoss(nn.Module):
    """The sum over all elements for each sample."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.crosses = layer["type"] == "SigmoidCrossEntropyLoss"

    def forward(self, x: Any, target: Any) -> Any:
        target = target.reshape(x.shape)
        if self.crosses:
            return F.binary_cross_entropy_with_logits(x, target, reduction="sum") / x.shape[0]
        return F.mse_loss(x, target, reduction="sum") / (2 * x.shape[0])


@maker("ContrastiveLoss")
class ContrastiveLoss(nn.Module):
    """d^2 of pairs that are alike, max(margin - d, 0)^2 of others, over twice the number of pairs."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.margin = layer["settings"]["margin"]

    def forward(self, a: Any, b: Any, similar: Any) -> Any:
        square = ((a - b) ** 2).sum(1)
        apart = (self.margin - (square + 1e-12).sqrt()).clamp(min=0) ** 2
        return torch.where(similar.bool(), square, apart).sum() / (2 * a.shape[0])


# -- detection --------------------------------------------------------------------------------------------


def prior_boxes(layer: Described) -> Any:
    """The blob of a PriorBox: boxes and their variances (1, 2, 4 P)."""
    s, (feature, image) = layer["settings"], layer["bottom_shapes"]
    ratios = [1.0]
    for ratio in s["ratios"]:
        for value in (ratio, 1 / ratio) if s["flip"] else (ratio,):
            if all(abs(value - other) >= 1e-6 for other in ratios):
                ratios.append(value)
    sizes = []
    for index, small in enumerate(int(size) for size in s["small"]):
        sizes.append((small, small))
        if s["large"]:
            sizes.append((math.sqrt(small * int(s["large"][index])),) * 2)
        sizes += [(small * math.sqrt(ratio), small / math.sqrt(ratio)) for ratio in ratios[1:]]
    step_y, step_x = (s["step"] or image[axis] / feature[axis] for axis in (2, 3))
    rows = []
    for y, x in itertools.product(range(feature[2]), range(feature[3])):
        cy, cx = (y + s["offset"]) * step_y, (x + s["offset"]) * step_x
        rows += [
            ((cx - w / 2) / image[3], (cy - h / 2) / image[2], (cx + w / 2) / image[3], (cy + h / 2) / image[2])
            for w, h in sizes
        ]
    boxes = torch.tensor(rows)
    boxes = boxes.clamp(0, 1) if s["clip"] else boxes
    variances = torch.tensor(s["variance"]).expand(len(rows), -1)
    return torch.stack((boxes.flatten(), variances.flatten()))[None]


def overlaps(first: Any, second: Any) -> Any:
    """Intersection over union of boxes (N, G, 4) and (P, 4): (N, G, P)."""
    low = torch.maximum(first[:, :, None, :2], second[:, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    return shared / (areas[0][:, :, None] + areas[1] - shared)


@maker("MultiBoxLoss")
class MultiBoxLoss(nn.Module):
    """SSD's loss on the device, without shapes that depend on values; as many objects in every image."""

    def __init__(self, layer: Described) -> None:
        super().__init__()
        self.s = layer["settings"]

    def match(self, boxes: Any, objects: Any) -> tuple[Any, Any]:
        """The object of each prior (N, P) or -1, and the largest overlap of each."""
        shared = overlaps(objects, boxes)
        best, nearest = shared.max(1)
        matches = torch.where(best > self.s["threshold"], nearest, torch.full_like(nearest, -1))
        rest, count, images = shared.clone(), boxes.shape[0], torch.arange(objects.shape[0], device=boxes.device)
        for _ in range(objects.shape[1]):
            place = rest.flatten(1).argmax(1)
            owner, prior = place // count, place % count
            matches[images, prior] = owner
            rest[images, owner] = -1
            rest[images, :, prior] = -1
        return matches, best

    def forward(self, locations: Any, scores: Any, priors: Any, truth: Any) -> Any:
        with torch.autocast(locations.device.type, enabled=False):
            return self.loss(locations.float(), scores.float(), priors.float(), truth.float())

    def loss(self, locations: Any, scores: Any, priors: Any, truth: Any) -> Any:
        """Smooth L1 of matched boxes and cross entropy of these and of the worst others, over the matches."""
        images, s = locations.shape[0], self.s
        truth = truth.view(images, -1, 8)
        boxes, variances = priors[0, 0].view(-1, 4), priors[0, 1].view(-1, 4)
        with torch.no_grad():
            matches, best = self.match(boxes, truth[:, :, 3:7])
            found = matches >= 0
            index = matches.clamp(min=0)
            objects = truth.gather(1, index[..., None].expand(-1, -1, 8))
            labels = torch.where(found, objects[..., 1].long(), torch.full_like(index, s["background"]))
            target = self.encode(boxes, variances, objects[..., 3:7])
        entropy = F.cross_entropy(scores.view(-1, s["classes"]), labels.flatten(), reduction="none").view(images, -1)
        with torch.no_grad():
            free = ~found & (best < s["overlap"])
            order = torch.where(free, entropy, torch.full_like(entropy, -1)).argsort(1, descending=True)
            wanted = (found.sum(1, keepdim=True) * s["ratio"]).long()
            taken = found | (free & (order.argsort(1) < wanted))
        far = F.smooth_l1_loss(locations.view(images, -1, 4), target, reduction="none").sum(2)
        total = s["weight"] * (far * found).sum() + (entropy * taken).sum()
        return total / found.sum().clamp(min=1)

    @staticmethod
    def encode(boxes: Any, variances: Any, objects: Any) -> Any:
        """Objects (N, P, 4) as differences to their priors, centre and size."""
        size, wanted = boxes[:, 2:] - boxes[:, :2], objects[..., 2:] - objects[..., :2]
        centres = [(corners[..., :2] + corners[..., 2:]) / 2 for corners in (boxes, objects)]
        moved = (centres[1] - centres[0]) / size
        return torch.cat((moved, torch.log(wanted / size)), -1) / variances
