"""Convolutions and gradients as correlations along each axis: sums over equidistant taps.

A data gradient with a stride is one correlation per residue: results residue, residue + stride, and so on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from caffepy.backend.cuda.convolution.problem import Direction, Problem


class Residue(NamedTuple):
    """The results of one residue along an axis: first factor, pixel offset, and number of factors."""

    first: int
    offset: int
    taps: int


@dataclass(frozen=True)
class Axis:
    """A correlation along one axis: result r of a residue sums factors k times pixels origin + offset + r * a + k * b.

    Args:
        results: number of results of each residue.
        a: pixel distance of neighbouring results.
        b: pixel distance of neighbouring factors.
        factors: number of factors.
        step: factor index step, negative if the factors are reversed.
        origin: pixel of the first result.
        residues: residues of the results.
    """

    results: int
    a: int
    b: int
    factors: int
    step: int
    origin: int
    residues: tuple[Residue, ...]

    @property
    def taps(self) -> int:
        """Maximum factors per result."""
        return max(residue.taps for residue in self.residues)

    def pixels(self, results: int, factors: int | None = None) -> int:
        """Return the pixels read by `results` neighbouring results, with `factors` factors (default: all)."""
        if factors is not None:
            return (results - 1) * self.a + (factors - 1) * self.b + 1
        return (results - 1) * self.a + max(p.offset + (p.taps - 1) * self.b for p in self.residues if p.taps) + 1


def axis_of(problem: Problem, direction: Direction, number: int) -> Axis:
    """Return a task's correlation along axis 0 or 1."""
    g = problem.geometry
    kernel, stride, pad, dilation = g.kernel[number], g.stride[number], g.pad[number], g.dilation[number]
    if direction is Direction.FORWARD:
        return Axis(problem.y[2 + number], stride, dilation, kernel, 1, -pad, (Residue(0, 0, kernel),))
    if direction is Direction.WEIGHTS:
        out = problem.y[2 + number]
        return Axis(kernel, dilation, stride, out, 1, -pad, (Residue(0, 0, out),))
    common = math.gcd(stride, dilation)
    step, b = stride // common, dilation // common
    residues = [_residue(kernel, stride, pad, dilation, residue) for residue in range(stride)]
    lowest = min(residue.offset for residue in residues if residue.taps)
    moved = tuple(p._replace(offset=p.offset - lowest) if p.taps else p for p in residues)
    return Axis(-(-problem.x[2 + number] // stride), 1, b, kernel, -step, lowest, moved)


def _residue(kernel: int, stride: int, pad: int, dilation: int, residue: int) -> Residue:
    """Return a data gradient's results residue + stride * q, summed from the last factor on."""
    common = math.gcd(stride, dilation)
    step = stride // common
    meeting = [k for k in range(min(step, kernel)) if (residue + pad - k * dilation) % stride == 0]
    if not meeting:
        return Residue(0, 0, 0)
    first = meeting[0]
    taps = -(-(kernel - first) // step)
    last = (residue + pad - first * dilation) // stride - (taps - 1) * dilation // common
    return Residue(first + (taps - 1) * step, last, taps)


def residues_text(axis: Axis) -> str:
    """Return a C++ initialiser of the residues."""
    return f"{{{', '.join(f'{{{p.first}, {p.offset}, {p.taps}}}' for p in axis.residues)}}}"
