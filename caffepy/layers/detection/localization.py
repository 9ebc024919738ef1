"""How far matched predictions are from their objects: smooth L1 and squared losses of encoded boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.layers.detection.boxes import Priors, Rows, decode, encode
from caffepy.layers.detection.ground_truth import GroundTruth
from caffepy.proto import caffe_pb2


@dataclass(frozen=True)
class Positives:
    """Predictions that belong to an object: their image, class of location, prior and object (K,)."""

    images: NDArray[np.intp]
    classes: NDArray[np.intp]
    priors: NDArray[np.intp]
    objects: NDArray[np.int32]

    @classmethod
    def of(cls, matches: NDArray[np.int32]) -> Positives:
        """Those in matches (N, L, P) with objects."""
        images, classes, priors = np.nonzero(matches >= 0)
        return cls(images, classes, priors, matches[images, classes, priors])

    def rows(self, locations: Rows) -> Rows:
        """Their predictions (K, 4), of (N, L, P, 4)."""
        return locations[self.images, self.classes, self.priors]


def differences(
    priors: Priors, locations: Rows, truth: GroundTruth, found: Positives, param: caffe_pb2.MultiBoxLossParameter
) -> Rows:
    """Prediction less encoded object (K, 4); 0 where `bp_inside` leaves out what lies outside of the image."""
    own, codes = priors.part(found.priors), found.rows(locations)
    predicted = codes / own.variances if param.encode_variance_in_target else codes
    result = predicted - encode(own, truth.boxes[found.objects], param.code_type)
    if param.bp_inside:
        boxes = own.boxes
        if not param.use_prior_for_matching:
            boxes = decode(own, codes, param.code_type, param.encode_variance_in_target)
        result[(boxes < 0) | (boxes > 1)] = 0
    return result


def box_losses(difference: Rows, squared: bool) -> Rows:
    """Each coordinate's loss: d^2 / 2, or |d| - 1 / 2 from |d| = 1 on unless `squared`."""
    size = np.abs(difference)
    half = np.float32(0.5)
    square = half * difference * difference
    return square if squared else np.where(size < 1, square, size - half)


def box_gradients(difference: Rows, squared: bool) -> Rows:
    """The derivative of `box_losses`."""
    return difference if squared else np.clip(difference, -1, 1)
