"""How wrong scores are about their labels: softmax and logistic losses of rows, and their gradients."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, Words, kernel
from caffepy.layers.detection.boxes import Rows

_SMALLEST = float(np.finfo(np.float32).tiny)
_GRAIN = 4096
"""Rows for each thread, at least."""


@kernel
def _class_losses(
    begin: Int, end: Int, scores: Floats, labels: Ints, classes: Int, logistic: Int, losses: Floats
) -> None:
    """losses = how wrong each row of scores is about its label; 0 where the label is negative."""
    for row in range(begin, end):
        losses[row] = 0
        label = labels[row]
        if label < 0:
            continue
        at = row * classes
        if logistic:
            loss = np.float32(0)
            for c in range(classes):
                x = scores[at + c]
                target = np.float32(1 if c == label else 0)
                over = np.float32(1 if x >= 0 else 0)
                negative = x if x < 0 else -x
                loss -= x * (target - over) - math.log(np.float32(1) + math.exp(negative))
            losses[row] = loss
            continue
        largest = scores[at]
        for c in range(1, classes):
            largest = max(largest, scores[at + c])
        total = np.float32(0)
        for c in range(classes):
            total += math.exp(scores[at + c] - largest)
        losses[row] = -math.log(max(math.exp(scores[at + label] - largest) / total, np.float32(_SMALLEST)))


def class_losses(threads: int, scores: Rows, labels: NDArray[np.int32], logistic: bool) -> Rows:
    """The loss of each prior's scores (N, P, C) by its label (N, P); 0 where that is negative."""
    losses = np.empty(labels.shape, np.float32)
    _class_losses.run(threads, labels.size, _GRAIN, scores, labels, scores.shape[-1], int(logistic), losses)
    return losses


@kernel
def _softmax_rows(
    begin: Int, end: Int, scores: Floats, rows: Words, labels: Ints, classes: Int, losses: Floats, gradients: Floats
) -> None:
    """losses = -log softmax(row)[label], gradients = softmax(row) - onehot(label), for the rows of these numbers."""
    for i in range(begin, end):
        at = rows[i] * classes
        largest = scores[at]
        for c in range(1, classes):
            largest = max(largest, scores[at + c])
        total = np.float32(0)
        for c in range(classes):
            gradients[at + c] = math.exp(scores[at + c] - largest)
            total += gradients[at + c]
        for c in range(classes):
            gradients[at + c] /= total
        losses[i] = -math.log(max(gradients[at + labels[i]], np.float32(_SMALLEST)))
        gradients[at + labels[i]] -= np.float32(1)


def softmax_loss(threads: int, scores: Rows, rows: NDArray[np.int64], labels: NDArray[np.int32]) -> tuple[float, Rows]:
    """The loss of those rows of the scores (..., C) by their labels (K,), and its gradient, 0 in all other rows."""
    losses, gradients = np.empty(len(rows), np.float32), np.zeros(scores.shape, np.float32)
    _softmax_rows.run(threads, len(rows), _GRAIN, scores, rows, labels, scores.shape[-1], losses, gradients)
    return float(losses.sum(dtype=np.float64)), gradients


def logistic_loss(scores: Rows, rows: NDArray[np.int64], targets: Rows) -> tuple[float, Rows]:
    """The same of the sum over classes of the cross entropy of sigmoid(score) and the target; targets are (K, C)."""
    classes = scores.shape[-1]
    x = scores.reshape(-1, classes)[rows]
    small = np.exp(-np.abs(x))
    losses = np.maximum(x, 0) - x * targets + np.log1p(small)
    gradients = np.zeros(scores.shape, np.float32)
    gradients.reshape(-1, classes)[rows] = np.where(x >= 0, 1, small) / (1 + small) - targets
    return float(losses.sum(dtype=np.float64)), gradients
