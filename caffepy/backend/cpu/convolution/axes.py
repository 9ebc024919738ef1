"""Per-axis index maps between a convolution's image and output, for the data gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def merged(indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return all combinations of indices along several axes, as flattened indices for the given sizes."""
    total = np.zeros(1, np.int64)
    for index, size in zip(indices, sizes, strict=True):
        total = (total[:, None] * size + np.asarray(index, np.int64)[None, :]).reshape(-1)
    return total


@dataclass(frozen=True)
class Axis:
    """Result pixels along one axis (or several merged ones), and their taps.

    Args:
        pixels: positions of the results.
        indices: source position that a tap of shift 0 reads, per result.
        taps: kernel indices of the taps.
        shifts: source shift of each tap, ascending.
    """

    pixels: Any
    indices: Any
    taps: Any
    shifts: Any


def taps_inside(axes: Sequence[Axis], sizes: Sequence[int]) -> Any:
    """Return for merged axes whether each pixel's taps read inside a source of these sizes (pixels, taps)."""
    valid = np.ones((1, 1), bool)
    for axis, size in zip(axes, sizes, strict=True):
        own = axis.indices[:, None] + axis.shifts[None, :]
        inside = (own >= 0) & (own < size)
        shape = (valid.shape[0] * inside.shape[0], valid.shape[1] * inside.shape[1])
        valid = (valid[:, None, :, None] & inside[None, :, None, :]).reshape(shape)
    return valid


def forward_axis(out: int, kernel: int, stride: int, pad: int, dilation: int) -> Axis:
    """Return the axis of a forward pass."""
    taps = np.arange(kernel)
    return Axis(np.arange(out), np.arange(out) * stride - pad, taps, taps * dilation)


def axis_residues(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[Axis]:
    """Return an image's pixels along one axis for each non-empty residue of the stride.

    A pixel h of the image with h + pad = stride i + residue receives from tap k the output pixel
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
    """Return (zeros before, padded size) such that every tap of every residue stays inside."""
    low = min([int(p.indices[0] + p.shifts[0]) for p in residues if len(p.shifts)], default=0)
    high = max([int(p.indices[-1] + p.shifts[-1]) for p in residues if len(p.shifts)], default=0)
    before = max(0, -low)
    return before, before + max(size, high + 1)


def merged_axes(
    parts: Sequence[Axis], sizes: Sequence[int], kernel: Sequence[int], before: Sequence[int], padded: Sequence[int]
) -> Axis:
    """Merge several axes into one: results of an image of these sizes, source with zeros `before` and padded sizes."""
    return Axis(
        merged([part.pixels for part in parts], sizes),
        merged([part.indices + zeros for part, zeros in zip(parts, before, strict=True)], padded),
        merged([part.taps for part in parts], kernel),
        merged([part.shifts for part in parts], padded),
    )
