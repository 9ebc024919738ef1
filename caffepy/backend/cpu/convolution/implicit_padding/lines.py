"""Rows and columns of windows, told apart by which taps lie inside the image: those that need no zeros around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.phases import Axis, merged, taps_inside


class Lines(NamedTuple):
    """Rows, or columns, of what is computed.

    Args:
        at: position of each in what is computed.
        source: the position that a tap of shift 0 reads, for each.
        shifts: of each tap.
        taps: number of each tap in the kernel.
        kinds: which taps lie inside the image, for each kind of line.
        kind: of each line.
    """

    at: Any
    source: Any
    shifts: Any
    taps: Any
    kinds: Any
    kind: Any


def lines_of(axes: Sequence[Axis], read: Sequence[int], made: Sequence[int], kernel: Sequence[int]) -> Lines:
    """Several axes taken as one; `read` and `made` are the sizes of what is read and of what is computed."""
    kinds, kind = np.unique(taps_inside(axes, read), axis=0, return_inverse=True)
    return Lines(
        merged([axis.pixels for axis in axes], made), merged([axis.indices for axis in axes], read),
        merged([axis.shifts for axis in axes], read), merged([axis.taps for axis in axes], kernel), kinds,
        kind.reshape(-1),
    )  # fmt: skip


def forward_axis(out: int, kernel: int, stride: int, pad: int, dilation: int) -> Axis:
    """What a forward pass computes along one axis."""
    taps = np.arange(kernel)
    return Axis(np.arange(out), np.arange(out) * stride - pad, taps, taps * dilation)
