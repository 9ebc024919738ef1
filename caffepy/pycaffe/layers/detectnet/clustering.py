"""Lists of boxes from DetectNet's grids: `caffe.layers.detectnet.clustering` of NVIDIA Caffe.

Similar rectangles are grouped as by `groupRectangles` of OpenCV before version 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.layers.python import PythonLayerBase


def group_rectangles(rectangles: Any, threshold: int, eps: float) -> tuple[Any, Any]:
    """Return the mean rectangle of each group of more than `threshold` similar ones, and the groups' sizes.

    Two rectangles are similar if their four sides are at most eps * (smaller width + smaller height) / 2 apart; a group
    is what a chain of similar rectangles connects. A group inside another one is left out if it has fewer than three
    rectangles, or the other has more than three and more than it. Groups come in the order of their first rectangles.

    Args:
        rectangles: x, y, width and height of each, (n, 4); fractions are cut off.
        threshold: 0: all rectangles are returned with the size 1.
        eps: relative distance within which rectangles are similar.
    """
    given = np.asarray(rectangles, np.float64).reshape(-1, 4).astype(np.int64)
    if threshold <= 0 or not len(given):
        return given, np.ones(len(given), np.int64)
    groups = _groups(given, eps)
    sizes = np.bincount(groups)
    totals = np.stack([np.bincount(groups, given[:, i]) for i in range(4)], 1)
    # OpenCV multiplies by the inverse in float32 and rounds halves to even numbers.
    means = np.rint(totals.astype(np.float32) * (np.float32(1) / sizes.astype(np.float32))[:, None]).astype(np.int64)
    large = sizes > threshold
    means, sizes = means[large], sizes[large]
    kept = [i for i in range(len(means)) if not _is_covered(i, means, sizes, eps)]
    return means[kept], sizes[kept]


def _groups(rectangles: Any, eps: float) -> Any:
    """Return the number of each rectangle's group."""
    sides = np.concatenate([rectangles[:, :2], rectangles[:, :2] + rectangles[:, 2:]], 1)
    groups = np.full(len(rectangles), -1)
    count = 0
    for first in range(len(rectangles)):
        if groups[first] >= 0:
            continue
        groups[first] = count
        waiting = [first]
        while waiting:
            one = waiting.pop()
            reach = eps * np.minimum(rectangles[:, 2:], rectangles[one, 2:]).sum(1) * 0.5
            similar = (np.abs(sides - sides[one]) <= reach[:, None]).all(1) & (groups < 0)
            groups[similar] = count
            waiting.extend(np.flatnonzero(similar))
        count += 1
    return groups


def _is_covered(i: int, means: Any, sizes: Any, eps: float) -> bool:
    """Whether group i lies inside another one that outweighs it."""
    slack = np.rint(means[:, 2:] * eps)
    first, last = means[:, :2] - slack, means[:, :2] + means[:, 2:] + slack
    inside = (means[i, :2] >= first).all(1) & (means[i, :2] + means[i, 2:] <= last).all(1)
    inside &= (sizes > max(3, sizes[i])) | (sizes[i] < 3)
    inside[i] = False
    return bool(inside.any())


MAX_BOXES = 50
"""Rows of each list; further boxes of an image are left out."""


class _Cluster(PythonLayerBase):
    """Bottoms: coverage (N, classes, h, w) and boxes (N, 4, h, w). Top c: the boxes of class c, (N, MAX_BOXES, 5)."""

    is_groundtruth = False
    settings: tuple[type, ...] = ()
    """Types of the numbers in `param_str`, without the optional last one, the number of classes."""

    image_size_x: int
    image_size_y: int
    stride: int
    gridbox_cvg_threshold: float = 0.0
    gridbox_rect_thresh: int = 0
    gridbox_rect_eps: float = 0.0
    min_height: int = 0
    num_classes: int

    def setup(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        names = (
            "image_size_x",
            "image_size_y",
            "stride",
            "gridbox_cvg_threshold",
            "gridbox_rect_thresh",
            "gridbox_rect_eps",
            "min_height",
        )
        words, count = self.param_str.split(","), len(self.settings)
        try:
            for name, kind, word in zip(names, self.settings, words[:count], strict=False):
                setattr(self, name, kind(word))
            self.num_classes = int(words[count]) if len(words) > count else 1
        except ValueError as error:
            raise ValueError(f"param_str '{self.param_str}' is not a list of numbers: {error}") from error
        if len(words) < count:
            raise ValueError(f"param_str '{self.param_str}' needs {count} numbers: {', '.join(names[:count])}")
        if len(top) != self.num_classes:
            raise ValueError(f"there are {len(top)} tops for {self.num_classes} classes; give one for each")

    def reshape(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        images, classes = bottom[0].shape[:2]
        if classes != self.num_classes:
            raise ValueError(f"the coverage has {classes} classes, and param_str {self.num_classes}")
        for blob in top:
            blob.reshape(images, MAX_BOXES, 5)

    def forward(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        for number, blob in enumerate(top):
            blob.data[...] = cluster(self, bottom[0].data[:, number : number + 1], bottom[1].data)

    def backward(self, top: Sequence[Any], propagate_down: list[bool], bottom: Sequence[Any]) -> None:
        """Boxes have no gradient."""


class ClusterGroundtruth(_Cluster):
    """Lists the distinct objects of a label grid. param_str: image width, height, stride, optionally classes."""

    is_groundtruth = True
    settings = (int, int, int)


class ClusterDetections(_Cluster):
    """Lists the groups of similar boxes that a net predicts.

    param_str: image width, height, stride, least coverage of a cell, size that a group must exceed, eps of the grouping
    (`group_rectangles`), least height of a box, optionally classes. The fifth column is the logarithm of the group's
    size.
    """

    settings = (int, int, int, float, int, float, int)


def gridbox_to_boxes(net_cvg: Any, net_boxes: Any, self: Any) -> tuple[Any, Any, Any]:
    """Return the boxes (n, 4) of an image's covered cells, their (x, y, coverage) (n, 3), and the cells' mask.

    Args:
        net_cvg: the coverage (1, h, w).
        net_boxes: corners relative to the cells (4, h, w).
        self: the layer.
    """
    high, wide = int(self.image_size_y / self.stride), int(self.image_size_x / self.stride)
    coverage = net_cvg[0, :high, :wide]
    mask = coverage > 0 if self.is_groundtruth else coverage >= self.gridbox_cvg_threshold
    y, x = np.nonzero(mask)
    corner = np.stack([x * (self.image_size_x / wide), y * (self.image_size_y / high)], 1)
    boxes = net_boxes[:, y, x].T + np.tile(corner, 2)
    return boxes, np.stack([x, y, coverage[y, x]], 1), mask


def vote_boxes(propose_boxes: Any, propose_cvgs: Any, mask: Any, self: Any) -> list[list[float]]:
    """Return x1, y1, x2, y2 and confidence of each group of similar boxes that is high enough."""
    if not propose_boxes.any():
        return []
    sized = np.concatenate([propose_boxes[:, :2], propose_boxes[:, 2:] - propose_boxes[:, :2]], 1)
    groups = zip(*group_rectangles(sized, self.gridbox_rect_thresh, self.gridbox_rect_eps), strict=True)
    return [
        [x, y, x + width, y + height, math.log(size)]
        for (x, y, width, height), size in groups
        if height >= self.min_height
    ]


def cluster(self: Any, net_cvg: Any, net_boxes: Any) -> Any:
    """Return the boxes of each image (N, MAX_BOXES, 5), 0 after the last one; in float16's precision, as NVIDIA's."""
    boxes = np.zeros((len(net_cvg), MAX_BOXES, 5))
    for number, (coverage, corners) in enumerate(zip(net_cvg, net_boxes, strict=True)):
        proposed = gridbox_to_boxes(coverage, corners, self)
        found = list(dict.fromkeys(map(tuple, proposed[0]))) if self.is_groundtruth else vote_boxes(*proposed, self)
        rows = np.asarray(found, np.float16).reshape(len(found), 4 + (not self.is_groundtruth))[:MAX_BOXES]
        boxes[number, : len(rows), : rows.shape[1]] = rows
    return boxes
