"""Objects, labels and scalar formulas for the tests of YOLO's layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Floats = Any
Box = tuple[float, float, float, float]

Objects = list[list[tuple[int, Box]]]
"""Class and box (center x, center y, width, height) of each object of each image."""

ANCHORS = [(1.0, 2.0), (2.5, 1.2), (3.0, 3.5)]
CLASSES = 4
PIXELS = [(10, 14), (30, 20), (40, 60), (80, 30), (90, 90)]
MASK = [4, 1, 2]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def iou(a: Box, b: Box) -> float:
    sides = [
        min(a[i] + a[i + 2] / 2, b[i] + b[i + 2] / 2) - max(a[i] - a[i + 2] / 2, b[i] - b[i + 2] / 2) for i in (0, 1)
    ]
    if min(sides) < 0:
        return 0.0
    shared = sides[0] * sides[1]
    return shared / (a[2] * a[3] + b[2] * b[3] - shared)


def softmax(x: Floats) -> Floats:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def objects_of(images: int, seed: int, most: int = 4, classes: int = CLASSES) -> Objects:
    """Per image a list of (class, center x, center y, width, height); two of the first image share a cell."""
    random = np.random.default_rng(seed)
    found = []
    for image in range(images):
        count = int(random.integers(1, most + 1)) if image else 0
        boxes = [(int(random.integers(classes)), tuple(random.uniform(0.1, 0.9, 4).tolist())) for _ in range(count)]
        found.append(boxes)
    found[0] = [(1, (0.52, 0.41, 0.2, 0.4)), (2, (0.53, 0.4, 0.21, 0.42)), (0, (0.05, 0.95, 0.5, 0.2))]
    return found


def yolo_rows(objects: Objects, rows: int = 6) -> Floats:
    table = np.zeros((len(objects), 1, rows, 5), np.float32)
    for image, found in enumerate(objects):
        for i, (label, box) in enumerate(found):
            table[image, 0, i] = label, *box
    return table


def annotated_rows(objects: Objects) -> Floats:
    rows = [
        (image, label + 1, 0, x - w / 2, y - h / 2, x + w / 2, y + h / 2, 0)
        for image, found in enumerate(objects)
        for label, (x, y, w, h) in found
    ]
    return np.array([[*rows, (-1,) * 8]], np.float32)[None]


def grid_labels(images: int, side: int, classes: int, seed: int) -> Floats:
    random, cells = np.random.default_rng(seed), side * side
    labels = np.zeros((images, 7 * cells), np.float32)
    labels[:, 2 * cells : 3 * cells] = -1
    for image in range(images):
        for _ in range(image + 2):
            box = random.uniform(0.1, 0.9, 4)
            cell = int(box[1] * side) * side + int(box[0] * side)
            labels[image, cell] = random.integers(2)
            labels[image, cells + cell], labels[image, 2 * cells + cell] = 1, random.integers(classes)
            labels[image, 3 * cells + 4 * cell : 3 * cells + 4 * cell + 4] = box
    return labels
