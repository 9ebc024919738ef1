"""SSD's matching, mining, losses and suppression once more: box by box, slow and plain, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Box = Sequence[float]
CORNER, CENTER_SIZE, CORNER_SIZE = 1, 2, 3


def area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def iou(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (area(a) + area(b) - width * height)


def decode(prior: Box, variance: Box, code: int, in_target: bool, value: Box) -> list[float]:
    v = [x if in_target else x * s for x, s in zip(value, variance, strict=True)]
    width, height = prior[2] - prior[0], prior[3] - prior[1]
    if code == CORNER:
        return [p + x for p, x in zip(prior, v, strict=True)]
    if code == CORNER_SIZE:
        return [p + x * s for p, x, s in zip(prior, v, (width, height) * 2, strict=True)]
    x, y = (prior[0] + prior[2]) / 2 + v[0] * width, (prior[1] + prior[3]) / 2 + v[1] * height
    w, h = math.exp(v[2]) * width, math.exp(v[3]) * height
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def encode(prior: Box, variance: Box, code: int, box: Box) -> list[float]:
    """Divided by the variance, wherever it is encoded."""
    width, height = prior[2] - prior[0], prior[3] - prior[1]
    if code == CORNER:
        v = [b - p for b, p in zip(box, prior, strict=True)]
    elif code == CORNER_SIZE:
        v = [(b - p) / s for b, p, s in zip(box, prior, (width, height) * 2, strict=True)]
    else:
        v = [
            ((box[0] + box[2]) - (prior[0] + prior[2])) / 2 / width,
            ((box[1] + box[3]) - (prior[1] + prior[3])) / 2 / height,
            math.log((box[2] - box[0]) / width),
            math.log((box[3] - box[1]) / height),
        ]
    return [x / s for x, s in zip(v, variance, strict=True)]


def match(boxes: Sequence[Box], objects: Sequence[Box], param: Any) -> tuple[list[int], list[float]]:
    """For each box its object, -1 or -2, and its largest overlap."""
    matches, largest = [-1] * len(boxes), [0.0] * len(boxes)
    if not objects:
        return matches, largest
    pairs = {}
    for i, box in enumerate(boxes):
        if param.ignore_cross_boundary_bbox and any(v < 0 or v > 1 for v in box):
            matches[i] = -2
            continue
        for j, other in enumerate(objects):
            if iou(box, other) > 1e-6:
                pairs[i, j] = iou(box, other)
                largest[i] = max(largest[i], pairs[i, j])
    free = set(range(len(objects)))
    while free:
        usable = [(-value, i, j) for (i, j), value in pairs.items() if j in free and matches[i] == -1]
        if not usable:
            break
        value, i, j = min(usable)
        matches[i], largest[i] = j, -value
        free.remove(j)
    if param.match_type == param.PER_PREDICTION:
        for i in range(len(boxes)):
            own = [(-value, j) for (k, j), value in pairs.items() if k == i and value >= param.overlap_threshold]
            if matches[i] == -1 and own:
                matches[i] = min(own)[1]
    return matches, largest


def suppress(boxes: Sequence[Box], order: Sequence[int], threshold: float, eta: float = 1.0) -> list[int]:
    kept: list[int] = []
    for i in order:
        if all(iou(boxes[i], boxes[k]) <= threshold for k in kept):
            kept.append(i)
            if eta < 1 and threshold > 0.5:
                threshold *= eta
    return kept


def score_loss(scores: Any, label: int, logistic: bool) -> tuple[float, Any]:
    """Loss and gradient of one prior's scores; label -1: none (logistic)."""
    x = np.asarray(scores, np.float64)
    target = (np.arange(len(x)) == label).astype(np.float64)
    if logistic:
        p = 1 / (1 + np.exp(-x))
        return float(-(target * np.log(p) + (1 - target) * np.log(1 - p)).sum()), p - target
    p = np.exp(x - x.max())
    p /= p.sum()
    return float(-np.log(p[label])), p - target


def box_loss(difference: Any, squared: bool) -> tuple[float, Any]:
    d = np.asarray(difference, np.float64)
    if squared:
        return float((d * d).sum() / 2), d
    small = np.abs(d) < 1
    return float(np.where(small, d * d / 2, np.abs(d) - 0.5).sum()), np.where(small, d, np.sign(d))


class MultiBox:
    """The sums of MultiBoxLoss over a batch, before they are divided.

    Args:
        param: a MultiBoxLossParameter.
        loc: predictions (N, P, L, 4).
        conf: scores (N, P, C).
        priors: boxes and variances (2, P, 4).
        rows: objects (G, 8).
    """

    def __init__(self, param: Any, loc: Any, conf: Any, priors: Any, rows: Any) -> None:
        self.param, self.loc, self.conf = param, loc.astype(np.float64), conf.astype(np.float64)
        self.priors, self.variances = priors.astype(np.float64)
        self.logistic = param.conf_loss_type == param.LOGISTIC
        self.loc_loss = self.conf_loss = 0.0
        self.loc_gradient, self.conf_gradient = np.zeros_like(self.loc), np.zeros_like(self.conf)
        self.matched = 0
        for image in range(len(loc)):
            own = [r for r in rows.astype(np.float64) if r[0] == image and r[1] > param.background_label_id]
            self._image(image, [r for r in own if param.use_difficult_gt or not r[7]])

    def _decoded(self, image: int, location: int) -> list[list[float]]:
        param = self.param
        return [
            decode(p, v, param.code_type, param.encode_variance_in_target, x)
            for p, v, x in zip(self.priors, self.variances, self.loc[image, :, location], strict=True)
        ]

    def _image(self, image: int, rows: list[Any]) -> None:
        param, objects = self.param, [r[3:7] for r in rows]
        labels = [param.background_label_id + 1 if param.map_object_to_agnostic else int(r[1]) for r in rows]
        if param.share_location:
            boxes = self.priors if param.use_prior_for_matching else self._decoded(image, 0)
            found = {0: match(boxes, objects, param)}
        elif param.use_prior_for_matching:
            matches, largest = match(self.priors, objects, param)
            found = {
                c: ([m if m >= 0 and rows[m][1] == c else -1 for m in matches], largest)
                for c in range(param.num_classes)
            }
        else:
            found = {}
            for c in range(param.num_classes):
                own = [j for j, r in enumerate(rows) if r[1] == c]
                matches, largest = match(self._decoded(image, c), [objects[j] for j in own], param)
                found[c] = ([own[m] if m >= 0 else m for m in matches], largest)
        negatives = None
        if param.mining_type != param.NONE:
            negatives = self._mine(image, found[0], objects, labels) if rows else []
        self._add(image, found, objects, labels, negatives)

    def _difference(self, image: int, location: int, prior: int, box: Box) -> Any:
        param, value, variance = self.param, self.loc[image, prior, location], self.variances[prior]
        predicted = value / variance if param.encode_variance_in_target else value
        difference = predicted - encode(self.priors[prior], variance, param.code_type, box)
        if param.bp_inside:
            inside = self.priors[prior]
            if not param.use_prior_for_matching:
                inside = decode(self.priors[prior], variance, param.code_type, param.encode_variance_in_target, value)
            difference[[v < 0 or v > 1 for v in inside]] = 0
        return difference

    def _mine(self, image: int, found: Any, objects: Any, labels: list[int]) -> list[int]:
        param, (matches, largest) = self.param, found
        losses = []
        for p, m in enumerate(matches):
            label = labels[m] if m >= 0 else param.background_label_id
            losses.append(score_loss(self.conf[image, p], label, self.logistic)[0])
            if m >= 0 and param.mining_type == param.HARD_EXAMPLE:
                losses[p] += box_loss(self._difference(image, 0, p, objects[m]), param.loc_loss_type == param.L2)[0]
        hard = param.mining_type == param.HARD_EXAMPLE
        eligible = [p for p, m in enumerate(matches) if hard or (m == -1 and largest[p] < param.neg_overlap)]
        wanted = param.sample_size if hard else int(sum(m >= 0 for m in matches) * param.neg_pos_ratio)
        order = sorted(eligible, key=lambda p: -losses[p])
        if param.HasField("nms_param") and param.nms_param.nms_threshold > 0:
            boxes = self.priors if param.use_prior_for_nms else self._decoded(image, 0)
            order = [p for p in order[: param.nms_param.top_k] if area(boxes[p]) >= 1e-5]
            order = suppress(boxes, order, param.nms_param.nms_threshold)
        chosen = set(order[:wanted])
        negatives = [p for p, m in enumerate(matches) if m == -1 and p in chosen]
        if hard:
            matches[:] = [m if m < 0 or p in chosen else -1 for p, m in enumerate(matches)]
        return negatives

    def _add(self, image: int, found: Any, objects: Any, labels: list[int], negatives: list[int] | None) -> None:
        param = self.param
        priors = range(len(self.priors))
        targets: dict[int, set[int]] = {p: set() for p in (priors if negatives is None else negatives)}
        for location, (matches, _) in found.items():
            for prior, m in enumerate(matches):
                if m < 0:
                    continue
                self.matched += 1
                targets.setdefault(prior, set()).add(labels[m])
                loss, gradient = box_loss(
                    self._difference(image, location, prior, objects[m]), param.loc_loss_type == param.L2
                )
                self.loc_loss += loss * param.loc_weight
                self.loc_gradient[image, prior, location] += gradient * param.loc_weight
        for prior, own in targets.items():
            if not own and not (self.logistic and negatives is None):
                own = {param.background_label_id}
            label = max(own, default=-1)
            loss, gradient = score_loss(self.conf[image, prior], label, self.logistic)
            if self.logistic:
                for other in own - {label}:
                    loss -= self.conf[image, prior, other]
                    gradient[other] -= 1
                # the other classes' targets are the background's number, as the reference's are
                for other in set(range(param.num_classes)) - own:
                    loss -= self.conf[image, prior, other] * param.background_label_id
                    gradient[other] -= param.background_label_id
            self.conf_loss += loss
            self.conf_gradient[image, prior] = gradient
