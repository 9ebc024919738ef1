"""Online hard example mining of R-FCN: SmoothL1LossOHEM, SoftmaxWithLossOHEM and BoxAnnotatorOHEM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.layers.detection.suppression import sort_like_cpp
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.loss import (
    SmoothL1LossLayer,
    _Parameter,
)
from caffepy.layers.softmax_loss import SoftmaxWithLossLayer


@register_layer("SmoothL1LossOHEM")
class SmoothL1LossOHEMLayer(SmoothL1LossLayer):
    """SmoothL1Loss with the divisors of `loss_param` (`smooth_L1_loss_ohem_layer.cpp` of R-FCN and Intel Caffe).

    loss = sum of f(w (a - b)) / divisor, where f(d) = d^2 / 2 if |d| < 1, else |d| - 1 / 2. a, b and the optional third
    bottom w are (N, C, H, W). The divisor is N H W (VALID, the default, and FULL), N (BATCH_SIZE), 1 (NONE) or
    `pre_fixed_normalizer`, at least 1 (PRE_FIXED). An optional second top (N, 1, H, W) holds the loss of each position,
    summed over the channels and not divided. `smooth_l1_loss_param.sigma`, which the forks do not read, is as in
    SmoothL1Loss.
    """

    bottoms = (2, 3)

    def _set_divisor(self, bottom: Blobs) -> None:
        batch = bottom[0].shape[0]
        positions = batch * math.prod(bottom[0].shape[2:])
        divisor = self.divisor(_Parameter.VALID, positions, batch)
        # R-FCN's forks count no valid labels here, also where ignore_label is given.
        self._divisor = float(max(positions, 1)) if divisor is None else divisor


@register_layer("SoftmaxWithLossOHEM")
class SoftmaxWithLossOHEMLayer(SoftmaxWithLossLayer):
    """SoftmaxWithLoss with up to three tops, under the name of `softmax_loss_ohem_layer.cpp` (R-FCN, Intel Caffe)."""


_REGIONS, _LOSS, _LABELS, _WEIGHTS = range(4)


@register_layer("BoxAnnotatorOHEM")
class BoxAnnotatorOHEMLayer(Layer):
    """Keeps the labels of the `roi_per_img` regions of each image that have the largest loss (Shrivastava et al. 2016).

    Bottoms: regions (R, 5, H, W), whose first channel names the image, losses (R, 1, H, W), labels (R, 1, H, W) and the
    weights of the box regression (R, B, H, W); axes of size 1 may be missing. Tops: the labels, `ignore_label` in place
    of those that are not kept, and the weights, 0 there. Equal losses stay in the order of `std::sort`. The bottoms'
    gradient is 0. Computed on the host (`box_annotator_ohem_layer.cpp` of R-FCN and Intel Caffe).

    Raises:
        ConfigError: roi_per_img is 0.
        ShapeError: the bottoms do not match.
        DataError: a loss is NaN, or a region names an image below 0.
    """

    bottoms = (4, 4)
    tops = (2, 2)
    exact_bottoms = frozenset({0, 1, 2, 3})
    float32_tops_from = 0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.box_annotator_ohem_param.roi_per_img < 1:
            raise self.error("box_annotator_ohem_param needs roi_per_img, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = []
        for blob in bottom:
            shape = blob.shape + (1,) * (4 - len(blob.shape))
            if len(shape) != 4:
                raise self.shape_error("needs bottoms of at most four axes", *bottom)
            shapes.append(shape)
        number, _, high, wide = shapes[_LOSS]
        wanted = {_REGIONS: 5, _LOSS: 1, _LABELS: 1}
        for index, shape in enumerate(shapes):
            if shape != (number, wanted.get(index, shape[1]), high, wide):
                raise self.shape_error("needs regions R 5 H W, losses and labels R 1 H W, weights R B H W", *bottom)
        self._shapes = shapes
        top[0].reshape((number, 1, high, wide))
        top[1].reshape(shapes[_WEIGHTS])

    def capture_blocker(self) -> str:
        return "it sorts losses on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values = [self.backend.to_host(blob.data) for blob in bottom]
        if not self.backend.holds_values:
            for blob in top:
                self.backend.from_host(None, blob.data)
            return
        regions, losses, labels, weights = (
            value.reshape(shape) for value, shape in zip(values, self._shapes, strict=True)
        )
        keep = self._kept(regions[:, 0], losses[:, 0]).reshape(losses.shape)
        ignored = np.float32(self.param.box_annotator_ohem_param.ignore_label)
        self.backend.from_host(np.where(keep, labels, ignored), top[0].data)
        self.backend.from_host(np.where(keep, weights, np.float32(0)), top[1].data)

    def _kept(self, images: Any, losses: Any) -> Any:
        """Return whether each position is kept, (positions,)."""
        keys = np.array(losses, np.float32).reshape(-1)
        if not (images >= 0).all():
            raise self.data_error(f"'{self.bottom_names[_REGIONS]}' names an image below 0")
        if np.isnan(keys).any():
            raise self.data_error(f"'{self.bottom_names[_LOSS]}' contains NaN; the net's losses diverged")
        order = np.arange(len(keys), dtype=np.int32)
        sort_like_cpp(keys, order)
        named = images.reshape(-1)[order].astype(np.int64)
        keep = np.zeros(math.prod(losses.shape), bool)
        for image in np.unique(named):
            keep[order[named == image][: self.param.box_annotator_ohem_param.roi_per_img]] = True
        return keep

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)
