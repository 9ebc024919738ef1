"""What a backend may compute for detectors: SSD's loss, whose priors, objects and choices stay on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from caffepy.backend.types import Array


@dataclass(frozen=True)
class BoxLossSettings:
    """What SSD's loss is to compute: fields of MultiBoxLossParameter; see `MultiBoxLossLayer`.

    Args:
        classes: with the background.
        background: its label.
        code: value of CodeType, how predictions stand for boxes.
        threshold: overlap from which on a prior belongs to an object.
        per_prediction: priors beside the best of each object may belong to it.
        ignore_crossing: priors that cross the image's border are left out.
        difficult: objects that are marked so count.
        agnostic: all objects are of the class behind the background's.
        mines: of the priors without an object `ratio` for each match count, those with the largest losses.
        ratio: see there.
        most_overlap: priors that overlap an object as much as this are not mined.
        logistic: scores are compared by cross entropy of their sigmoids, else by that of their softmax.
        squared: boxes are compared by d^2 / 2, else by the smooth L1 loss.
        variance_in_target: predictions are not to be divided by the priors' variances.
        inside: coordinates of priors beside the image do not count.
        weight: of the boxes' loss.
        boxes_count: whether the boxes' loss is part of the loss.
        scores_count: whether that of the scores is.
    """

    classes: int
    background: int
    code: int
    threshold: float
    per_prediction: bool
    ignore_crossing: bool
    difficult: bool
    agnostic: bool
    mines: bool
    ratio: float
    most_overlap: float
    logistic: bool
    squared: bool
    variance_in_target: bool
    inside: bool
    weight: float
    boxes_count: bool
    scores_count: bool


class BoxLoss(Protocol):
    """SSD's loss of batches of one shape, computed on the device; the layer is `MultiBoxLossLayer`.

    Locations (N, 4 P), scores (N, P classes), priors (1, 2, 4 P) and objects (1, 1, G, 8) are float32.
    """

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        """totals = the sum of all losses and the number of matches, float32 (2,).

        problem: float32 (10,); its first element becomes, if it is 0, 1 where the image or label of an object is no
        number, 2 where a label names no class, 3 where a prior has no extent or variance. The second then is the number
        of the row, and its values follow: the first four of an object; box and variances of a prior.
        """

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the locations, which must still be there."""

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        """gradient = their derivative by the scores."""


class DetectionPrimitives:
    """Part of `Backend`."""

    computes_box_loss: bool = False
    """Whether `box_loss` gives SSD's loss; where not, the layer computes it on the host."""

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        """SSD's loss for so many images and priors of each, where `computes_box_loss` holds."""
        raise AssertionError("SSD's loss is computed on the host")
