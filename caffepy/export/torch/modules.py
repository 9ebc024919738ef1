"""The classes that exported files contain for layers that PyTorch has no module for.

`write` copies the text of each class that a net uses, and of the classes that this class uses. It does not import this
module.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MaxPool(nn.Module):
    """Maximum of each window; the image is padded by any width."""

    def __init__(self, kernel, stride, before, after):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.pad = (before[1], after[1], before[0], after[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(x, self.pad, value=-math.inf), self.kernel, self.stride)


class MaxPoolWithMask(nn.Module):
    """Maximum of each window, and its position h * width + w in the image as a number of x's type."""

    def __init__(self, kernel, stride, padding=0, ceil_mode=False):
        super().__init__()
        self.pool = nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil_mode, return_indices=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, index = self.pool(x)
        return y, index.to(x.dtype)


class AveragePool(nn.Module):
    """Average of each window: padding counts as zeros, what a window has beyond it does not count."""

    def __init__(self, kernel, stride, pad, beyond):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.pad = (pad[1], pad[1], pad[0], pad[0])
        self.beyond = (0, beyond[1], 0, beyond[0])

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, self.pad)
        counted = F.pad(torch.ones_like(padded[:1, :1]), self.beyond)
        sums = F.avg_pool2d(F.pad(padded, self.beyond), self.kernel, self.stride)
        return sums / F.avg_pool2d(counted, self.kernel, self.stride)


class StochasticPool(nn.Module):
    """Each window's elements weighted by themselves, as stochastic pooling has it outside of training."""

    def __init__(self, kernel, stride, ceil_mode):
        super().__init__()
        self.average = nn.AvgPool2d(kernel, stride, ceil_mode=ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        total = self.average(x)
        return torch.where(total > 0, self.average(x * x) / total, torch.zeros_like(total))


class Unpool(nn.Module):
    """Elements at the positions h * width + w of a larger image that a mask gives; zeros elsewhere."""

    def __init__(self, height, width):
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        image = x.new_zeros(*x.shape[:2], self.height * self.width)
        image.scatter_(2, mask.flatten(2).long(), x.flatten(2))
        return image.unflatten(2, (self.height, self.width))


class Scale(nn.Module):
    """x * weight + bias; the weights' shape is that of x's last axes, or 1."""

    def __init__(self, *shape, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y if self.bias is None else y + self.bias


class Bias(nn.Module):
    """x + bias; the bias's shape is that of x's last axes, or 1."""

    def __init__(self, *shape):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Constant(nn.Module):
    """A learned tensor."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


class LocalResponseNormWithinChannel(nn.Module):
    """x / (1 + alpha * mean of x^2 around each position) ** beta."""

    def __init__(self, size, alpha, beta):
        super().__init__()
        self.average = nn.AvgPool2d(size, stride=1, padding=size // 2)
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.alpha * self.average(x * x)) ** -self.beta


class MeanVarianceNorm(nn.Module):
    """(x - mean) / (deviation + eps) over some axes of each image; without `scale` only x - mean."""

    def __init__(self, axes, eps, scale=True):
        super().__init__()
        self.axes, self.eps, self.scale = axes, eps, scale

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(self.axes, keepdim=True)
        if not self.scale:
            return centred
        return centred / (centred.square().mean(self.axes, keepdim=True).sqrt() + self.eps)


class L2Norm(nn.Module):
    """weight * x / length of x, over the channels or, with several `axes`, over the image."""

    def __init__(self, *shape, axes=(1,), eps=1e-10):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.axes, self.eps = axes, eps

    def forward(self, x: Tensor) -> Tensor:
        length = (x.square().sum(self.axes, keepdim=True) + self.eps).sqrt()
        return x / length * self.weight


class Embed(nn.Module):
    """Rows of a table, plus a bias."""

    def __init__(self, rows, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index.long(), self.weight) + self.bias


class ArgMax(nn.Module):
    """Indices of the largest elements along an axis, the last of equal ones first; or their values."""

    def __init__(self, axis, top_k=1, values=False):
        super().__init__()
        self.axis, self.top_k, self.values = axis, top_k, values

    def forward(self, x: Tensor) -> Tensor:
        values, index = x.flip(self.axis).sort(dim=self.axis, descending=True, stable=True)
        chosen = values if self.values else (x.shape[self.axis] - 1 - index).to(x.dtype)
        return chosen.narrow(self.axis, 0, self.top_k)


class LSTM(nn.Module):
    """Hidden states (T, N, D) of an LSTM that starts from 0 and where `cont` (T, N) is 0.

    The gates are in the order input, forget, output, cell. x is (T, N, ...); `static` (N, ...), if there is one, is
    seen at each time step.
    """

    def __init__(self, inputs, size, static_inputs=0):
        super().__init__()
        self.input = nn.Linear(inputs, 4 * size)
        self.static = nn.Linear(static_inputs, 4 * size, bias=False) if static_inputs else None
        self.hidden = nn.Linear(size, 4 * size, bias=False)

    def forward(self, x: Tensor, cont: Tensor, static: Tensor | None = None) -> Tensor:
        sums = self.input(x.flatten(2))
        if static is not None:
            sums = sums + self.static(static.flatten(1))
        hidden = cell = x.new_zeros(x.shape[1], self.hidden.in_features)
        outputs = []
        for own, keep in zip(sums, cont.unsqueeze(2), strict=True):
            i, f, o, g = (own + self.hidden(keep * hidden)).chunk(4, dim=1)
            cell = keep * torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            outputs.append(hidden)
        return torch.stack(outputs)


class RNN(nn.Module):
    """Outputs (T, N, D) of a recurrent net that starts from 0 and where `cont` (T, N) is 0.

    x is (T, N, ...); `static` (N, ...), if there is one, is seen at each time step.
    """

    def __init__(self, inputs, size, static_inputs=0):
        super().__init__()
        self.input = nn.Linear(inputs, size)
        self.static = nn.Linear(static_inputs, size, bias=False) if static_inputs else None
        self.hidden = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size)

    def forward(self, x: Tensor, cont: Tensor, static: Tensor | None = None) -> Tensor:
        sums = self.input(x.flatten(2))
        if static is not None:
            sums = sums + self.static(static.flatten(1))
        hidden = x.new_zeros(x.shape[1], self.hidden.in_features)
        outputs = []
        for own, keep in zip(sums, cont.unsqueeze(2), strict=True):
            hidden = torch.tanh(own + self.hidden(keep * hidden))
            outputs.append(torch.tanh(self.output(hidden)))
        return torch.stack(outputs)


class ROIPool(nn.Module):
    """Maximum of height x width parts of each region; regions (R, 5) are image, x1, y1, x2, y2 before `scale`."""

    def __init__(self, height, width, scale):
        super().__init__()
        self.height, self.width, self.scale = height, width, scale

    def forward(self, x: Tensor, regions: Tensor) -> Tensor:
        pooled = x.new_zeros(len(regions), x.shape[1], self.height, self.width)
        for region, result in zip(regions.reshape(-1, 5), pooled, strict=True):
            left, top, right, bottom = self.rounded(region[1:] * self.scale).int().tolist()
            rows = self.parts(top, max(bottom - top + 1, 1), self.height, x.shape[2])
            columns = self.parts(left, max(right - left + 1, 1), self.width, x.shape[3])
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    part = x[int(region[0]), :, row, column].flatten(1)
                    if part.shape[1]:
                        result[:, i, j] = part.amax(1)
        return pooled

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        """The nearest integers, halves away from zero."""
        whole = x.trunc()
        return whole + x.sign() * ((x - whole).abs() >= 0.5)

    @staticmethod
    def parts(first, size, count, limit):
        """The pixels of each of `count` overlapping parts along an axis."""
        edges = torch.arange(count + 1, dtype=torch.float32) * (size / count)
        begins, ends = edges[:-1].floor().int() + first, edges[1:].ceil().int() + first
        return [slice(*pair) for pair in torch.stack([begins, ends], dim=1).clamp(0, limit).tolist()]


class PriorBox(nn.Module):
    """Boxes around each position of a feature map and their variances, (1, 2, 4 P), as parts of the image's sides.

    A position has for each of `min_sizes` a square of this side, one of side sqrt(min_size * max_size) if there are
    `max_sizes`, and a box of the first square's area for each of `ratios`; and the `boxes`, a width and a height each.
    Sizes, `step` and `image` are in pixels, and of these two heights come before widths; by default they come from the
    inputs' shapes.
    """

    def __init__(
        self,
        min_sizes,
        max_sizes=(),
        ratios=(),
        step=None,
        image=None,
        offset=0.5,
        clip=False,
        variances=(0.1,) * 4,
        boxes=(),
    ):
        super().__init__()
        extents = list(boxes)
        for index, size in enumerate(min_sizes):
            extents.append((size, size))
            if max_sizes:
                extents.append((math.sqrt(size * max_sizes[index]),) * 2)
            extents += [(size * math.sqrt(ratio), size / math.sqrt(ratio)) for ratio in ratios]
        self.extents, self.step, self.image, self.offset = extents, step, image, offset
        self.clip, self.variances = clip, variances

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        (rows, columns), (height, width) = features.shape[2:], self.image or image.shape[2:]
        down, right = self.step or (height / rows, width / columns)
        double = {"dtype": torch.float64, "device": features.device}
        y, x = torch.meshgrid(
            (torch.arange(rows, **double) + self.offset) * down,
            (torch.arange(columns, **double) + self.offset) * right,
            indexing="ij",
        )
        centers = torch.stack([x, y], dim=2).unsqueeze(2)
        halves = torch.tensor(self.extents, **double) / 2
        sides = torch.tensor([width, height], **double)
        boxes = torch.cat([(centers - halves) / sides, (centers + halves) / sides], dim=3)
        boxes = boxes.clamp(0, 1) if self.clip else boxes
        variances = torch.tensor(self.variances, **double).expand_as(boxes)
        return torch.stack([boxes.flatten(), variances.flatten()]).unsqueeze(0).to(features.dtype)


class DetectionOutput(nn.Module):
    """Boxes after non-maximum suppression, (1, 1, D, 7): image, label, score, xmin, ymin, xmax, ymax.

    Inputs are predictions (N, 4 P), or (N, 4 P C) without `share_location`, scores (N, P C) and priors (1, 2, 4 P) with
    their variances. Rows are ordered by image, label and score. If nothing is found, there is a row (image, -1, ...)
    for each image.
    """

    def __init__(
        self,
        classes,
        background=0,
        threshold=0.45,
        top_k=-1,
        keep_top_k=-1,
        min_score=-math.inf,
        eta=1.0,
        code="CENTER_SIZE",
        share_location=True,
        variance_encoded=False,
    ):
        super().__init__()
        self.classes, self.background, self.min_score = classes, background, min_score
        self.threshold, self.eta, self.top_k, self.keep_top_k = threshold, eta, top_k, keep_top_k
        self.code, self.share_location, self.variance_encoded = code, share_location, variance_encoded

    def forward(self, predictions: Tensor, scores: Tensor, priors: Tensor, *_: Tensor) -> Tensor:
        priors, variances = priors.reshape(2, -1, 1, 4)
        codes = predictions.reshape(len(predictions), len(priors), -1, 4)
        boxes = self.decode(codes if self.variance_encoded else codes * variances, priors)
        scores = scores.reshape(len(scores), len(priors), self.classes)
        images = range(len(boxes))
        rows = torch.cat([self.of_image(image, boxes[image], scores[image]) for image in images])
        if not len(rows):
            rows = scores.new_tensor([[image, -1, -1, -1, -1, -1, -1] for image in images])
        return rows.reshape(1, 1, -1, 7)

    def decode(self, codes: Tensor, priors: Tensor) -> Tensor:
        """The boxes that predictions encode relative to the priors."""
        if self.code == "CORNER":
            return priors + codes
        low, high = priors.split(2, dim=-1)
        if self.code == "CORNER_SIZE":
            return priors + codes * torch.cat([high - low, high - low], dim=-1)
        shift, growth = codes.split(2, dim=-1)
        center = shift * (high - low) + (low + high) / 2
        half = growth.exp() * (high - low) / 2
        return torch.cat([center - half, center + half], dim=-1)

    def of_image(self, image: int, boxes: Tensor, scores: Tensor) -> Tensor:
        """The rows of one image with boxes (P, L, 4) and scores (P, C)."""
        rows = []
        for label in range(self.classes):
            if label != self.background:
                own = boxes[:, 0 if self.share_location else label]
                chosen = self.suppress(own, scores[:, label])
                ends = scores.new_tensor([image, label]).expand(len(chosen), 2)
                rows.append(torch.cat([ends, scores[chosen, label, None], own[chosen]], dim=1))
        found = torch.cat(rows)
        if 0 <= self.keep_top_k < len(found):
            best = found[:, 2].sort(descending=True, stable=True).indices[: self.keep_top_k]
            found = found[best]
            found = found[found[:, 1].sort(stable=True).indices]
        return found

    def suppress(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """Indices of the boxes that no better box overlaps, in the order of their scores."""
        candidates = (scores > self.min_score).nonzero().flatten()
        order = candidates[scores[candidates].sort(descending=True, stable=True).indices]
        order = order[: self.top_k] if self.top_k >= 0 else order
        boxes = boxes[order]
        low = torch.maximum(boxes[:, None, :2], boxes[:, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[:, 2:])
        shared = (high - low).clamp(min=0).prod(2)
        areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
        overlaps = torch.where(shared > 0, shared / (areas[:, None] + areas - shared), torch.zeros_like(shared))
        threshold, kept = self.threshold, []
        largest = torch.zeros_like(areas)
        for index in range(len(order)):
            if largest[index] <= threshold:
                kept.append(index)
                threshold *= self.eta if threshold > 0.5 else 1
                largest = torch.maximum(largest, overlaps[index])
        return order[kept]
