"""Lists of boxes from DetectNet's grids: `caffe.layers.detectnet.clustering` of NVIDIA Caffe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.layers.python import PythonLayerBase
from caffepy.pycaffe.layers.detectnet.rectangles import group_rectangles

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
        names = ("image_size_x", "image_size_y", "stride", "gridbox_cvg_threshold", "gridbox_rect_thresh",
                 "gridbox_rect_eps", "min_height")  # fmt: skip
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
        [x, y, x + width, y + height, math.log(size)] for (x, y, width, height), size in groups
        if height >= self.min_height
    ]  # fmt: skip


def cluster(self: Any, net_cvg: Any, net_boxes: Any) -> Any:
    """Return the boxes of each image (N, MAX_BOXES, 5), 0 after the last one; in float16's precision, as NVIDIA's."""
    boxes = np.zeros((len(net_cvg), MAX_BOXES, 5))
    for number, (coverage, corners) in enumerate(zip(net_cvg, net_boxes, strict=True)):
        proposed = gridbox_to_boxes(coverage, corners, self)
        found = list(dict.fromkeys(map(tuple, proposed[0]))) if self.is_groundtruth else vote_boxes(*proposed, self)
        rows = np.asarray(found, np.float16).reshape(len(found), 4 + (not self.is_groundtruth))[:MAX_BOXES]
        boxes[number, : len(rows), : rows.shape[1]] = rows
    return boxes
