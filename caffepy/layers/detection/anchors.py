"""Offsets of boxes in pixels from anchors and from regions, as MS-CNN and Cascade R-CNN compute them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows

_f32 = np.float32


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation (4,) of the offsets x, y, width and height."""

    mean: Rows
    std: Rows

    def apply(self, offsets: Rows) -> Rows:
        """Return offsets (n, 4) in units of the standard deviation."""
        return (offsets - self.mean) / self.std

    def undo(self, predictions: Rows) -> Rows:
        """Return the offsets of predictions (n, 4)."""
        return predictions * self.std + self.mean


def read_normalisation(layer: Layer) -> Normalisation:
    """Return the values of bbox_reg_param; mean 0 and deviation 1 if one of them is not given.

    Raises:
        ConfigError: there are not four values, or a deviation is not above 0.
    """
    param = layer.param.bbox_reg_param
    mean, std = list(param.bbox_mean), list(param.bbox_std)
    if not mean or not std:
        return Normalisation(np.zeros(4, _f32), np.ones(4, _f32))
    if len(mean) != 4 or len(std) != 4 or not min(std) > 0:
        raise layer.error("bbox_reg_param needs four bbox_mean and four bbox_std, of x, y, width, height, std above 0")
    return Normalisation(np.array(mean, _f32), np.array(std, _f32))


@dataclass(frozen=True)
class Limits:
    """The limits of offsets: position as a fraction of the anchor's size, and the logarithm of the size's factor."""

    place: float
    size: float


def read_limits(layer: Layer, place: float, size: float) -> Limits:
    """Return the limits of the fields field_xyr and field_whr.

    Raises:
        ConfigError: field_xyr is not above 0, or field_whr is below 1.
    """
    if not place > 0 or not size >= 1:
        raise layer.error(f"field_xyr is {place:g} and field_whr {size:g}; they must be above 0 and at least 1")
    return Limits(1 / place, float(np.log(_f32(size))))


@dataclass(frozen=True)
class Anchors:
    """The anchors of a map: width and height of each kind, and the pixels from one position to the next."""

    widths: Rows
    heights: Rows
    stride: int

    def centers(self, rows: int, columns: int) -> tuple[Rows, Rows]:
        """Return the x (columns,) and y (rows, 1) of the positions' centers."""
        x, y = ((np.arange(count, dtype=_f32) + _f32(0.5)) * _f32(self.stride) for count in (columns, rows))
        return x, y[:, None]

    def decode(self, predictions: Rows, normalisation: Normalisation, limits: Limits) -> Rows:
        """Return the boxes (..., K, 4, H, W) of predictions of this shape: x, y, width, height; K kinds of anchors."""
        shape = (4, 1, 1)
        offsets = predictions * normalisation.std.reshape(shape) + normalisation.mean.reshape(shape)
        places = np.clip(offsets[..., :2, :, :], -_f32(limits.place), _f32(limits.place))
        sizes = np.exp(np.clip(offsets[..., 2:, :, :], -_f32(limits.size), _f32(limits.size)))
        x, y = self.centers(*predictions.shape[-2:])
        width, height = self.widths[:, None, None], self.heights[:, None, None]
        sides = [width * sizes[..., 0, :, :], height * sizes[..., 1, :, :]]
        left = places[..., 0, :, :] * width + x - sides[0] / _f32(2)
        top = places[..., 1, :, :] * height + y - sides[1] / _f32(2)
        return np.stack([left, top, *sides], -3)

    def encode(self, boxes: Rows, normalisation: Normalisation) -> Rows:
        """Return the predictions (..., K, 4, H, W) for boxes of this shape: x and y of the center, width, height."""
        shape = (4, 1, 1)
        x, y = self.centers(*boxes.shape[-2:])
        width, height = self.widths[:, None, None], self.heights[:, None, None]
        offsets = [
            (boxes[..., 0, :, :] - x) / width,
            (boxes[..., 1, :, :] - y) / height,
            np.log(np.maximum(boxes[..., 2, :, :], _f32(2)) / width),
            np.log(np.maximum(boxes[..., 3, :, :], _f32(2)) / height),
        ]
        return (np.stack(offsets, -3) - normalisation.mean.reshape(shape)) / normalisation.std.reshape(shape)


def read_anchors(layer: Layer, widths: object, heights: object, stride: int, name: str) -> Anchors:
    """Return the anchors of a map.

    Args:
        layer: for messages.
        widths: values of field_w.
        heights: values of field_h.
        stride: the value of the field `name`.
        name: downsample_rate or stride.

    Raises:
        ConfigError: a value is missing or 0.
    """
    sizes = [np.atleast_1d(np.asarray(values, _f32)) for values in (widths, heights)]
    if len(sizes[0]) != len(sizes[1]) or not len(sizes[0]) or not min(sizes[0].min(), sizes[1].min(), stride) > 0:
        raise layer.error(f"needs as many field_w as field_h, and {name}, all above 0")
    return Anchors(sizes[0], sizes[1], stride)


def decode_regions(predictions: Rows, regions: Rows, normalisation: Normalisation) -> Rows:
    """Return the corners (R, C, 4) of the boxes that predictions (R, C, 4) encode relative to regions (R, 4).

    The regions are first and last pixels (DecodeBBoxesWithPrior).
    """
    sides = regions[:, None, 2:] - regions[:, None, :2] + _f32(1)
    centers = (regions[:, None, 2:] + regions[:, None, :2]) * _f32(0.5)
    offsets = normalisation.undo(predictions)
    new_sides = sides * np.exp(offsets[..., 2:])
    first = offsets[..., :2] * sides + centers - (new_sides - _f32(1)) / _f32(2)
    return np.concatenate([first, first + new_sides - _f32(1)], -1)
