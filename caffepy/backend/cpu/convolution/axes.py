"""Which pixels of a convolution's image and output meet, axis by axis, for the gradient of the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def merged(indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """All combinations of indices along several axes of these sizes, each as one index along the axes as one."""
    total = np.zeros(1, np.int64)
    for index, size in zip(indices, sizes, strict=True):
        total = (total[:, None] * size + np.asarray(index, np.int64)[None, :]).reshape(-1)
    return total


@dataclass(frozen=True)
class Axis:
    """Pixels that are computed, along one axis or several taken as one, and the taps that reach them.

    Args:
        pixels: positions of what is computed.
        indices: for each, the position in what is read that a tap of shift 0 meets.
        taps: numbers of the kernel's elements.
        shifts: of each tap, ascending.
    """

    pixels: Any
    indices: Any
    taps: Any
    shifts: Any


def taps_inside(axes: Sequence[Axis], sizes: Sequence[int]) -> Any:
    """Of several axes taken as one: whether each pixel's taps read inside of what has these sizes (pixels, taps)."""
    valid = np.ones((1, 1), bool)
    for axis, size in zip(axes, sizes, strict=True):
        own = axis.indices[:, None] + axis.shifts[None, :]
        inside = (own >= 0) & (own < size)
        shape = (valid.shape[0] * inside.shape[0], valid.shape[1] * inside.shape[1])
        valid = (valid[:, None, :, None] & inside[None, :, None, :]).reshape(shape)
    return valid


def axis_residues(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Axis]:
    """The pixels of an image along one axis, for each residue of the stride that has some.

    A pixel h of the image with h + pad = stride i + residue gets from tap k the output pixel
    i + (residue - k dilation) / stride.
    """
    residues = []
    for residue in range(stride):
        pixels = np.array([h for h in range(size) if (h + pad) % stride == residue], np.int64)
        taps = np.array([k for k in reversed(range(kernel)) if (residue - k * dilation) % stride == 0], np.int64)
        if len(pixels):
            residues.append(Axis(pixels, (pixels + pad) // stride, taps, (residue - taps * dilation) // stride))
    return residues


def reach(residues: list[Axis], size: int) -> tuple[int, int]:
    """(zeros needed before, padded size) so that every tap of every residue stays inside."""
    low = min([int(p.indices[0] + p.shifts[0]) for p in residues if len(p.shifts)], default=0)
    high = max([int(p.indices[-1] + p.shifts[-1]) for p in residues if len(p.shifts)], default=0)
    before = max(0, -low)
    return before, before + max(size, high + 1)


def merged_axes(
    parts: Sequence[Axis], sizes: Sequence[int], kernel: Sequence[int], before: Sequence[int], padded: Sequence[int]
) -> Axis:
    """Several axes as one: of an image of these sizes, read from what has zeros `before` and these padded sizes."""
    return Axis(
        merged([part.pixels for part in parts], sizes),
        merged([part.indices + zeros for part, zeros in zip(parts, before, strict=True)], padded),
        merged([part.taps for part in parts], kernel),
        merged([part.shifts for part in parts], padded),
    )
