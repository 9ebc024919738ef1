"""Convolution on the CPU, channels last, straight from the (padded) image.

With channels last, the elements of one kernel row that meet an output pixel lie next to each other, so a tile of
output pixels by output channels is a sum over kernel rows of small matrix products that read the image in place: no
columns are written (im2col), which would cost as much memory traffic as the products themselves. The gradient of the
image is the same sum over the padded gradient of the output, once for each phase of the stride; that of an image of a
few channels goes another way (`few_channels.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import (
    EVERY,
    Correlation,
    Ending,
    Filters,
    Padding,
    Pixels,
    Taps,
    pack_all,
)
from caffepy.backend.cpu.convolution.few_channels import FewChannelsGradient, has_few_channels
from caffepy.backend.cpu.convolution.phases import Axis, axis_phases, merged_axes, reach
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.weight_gradient import WeightGradient
from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.kernel import ConstantTable
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.workspace import Workspace, aligned
from caffepy.backend.types import Geometry

CHUNK = 8 * 2**20
"""Elements of padded images, or of groups of one, made at a time: the workspace grows with neither batch nor image."""
CHUNK_GROUPS = 2**18
"""Elements for each thread of whole images whose groups lie apart, which then are in the second cache when they are
read. Fewer groups of an image at a time take up to twice as long, with vectors of eight: lines are read in parts."""
CACHED = 2**18
"""Elements for each thread of gradients that all phases pass over before the next ones."""


class TileConvolution:
    """A planned convolution over two or more spatial axes; arrays lie channels last in memory.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: how the windows move.
    """

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        self.threads, self.workspace = threads, workspace
        self.shape = ConvolutionShape(x_shape, weights_shape, geometry)
        columns = self.shape.channels * geometry.kernel[-1]
        self.zeros = ConstantTable(np.zeros(max(self.shape.outputs, columns), np.float32))
        self.kept: Any = None
        self._kept_at = 0
        self._forward: Correlation | None = None
        self._backward: list[Correlation] | None = None
        self._few: FewChannelsGradient | None = None
        self._gradient: WeightGradient | None = None

    # -- forward ------------------------------------------------------------------------------------

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        plan, start, packed = self._planned(), self.zeros if bias is None else bias, self.packed(weights)
        for some, groups, padded in self._padded(x, self.shape.padding):
            ending = Ending(None if residual is None else residual[some], relu)
            plan.run(self.threads, some.stop - some.start, padded, packed, start, y[some], ending, groups)

    def _planned(self) -> Correlation:
        if self._forward is None:
            self._forward = _plan_forward(self.shape)
        return self._forward

    @property
    def packed_size(self) -> int:
        """Elements of the weights in the order of `forward`."""
        return self._planned().packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        """Bring weights into the order of `forward`."""
        self._planned().pack(self.threads, weights, self.shape.group_step, packed)

    def packed(self, weights: Any) -> Any:
        """Weights in the order of `forward`: kept, or packed for the present pass."""
        packed = self.kept_for(weights)
        if packed is None:
            packed = self.workspace.take("weights", self.packed_size)
            self.pack(weights, packed)
        return packed

    def keep(self, weights: Any) -> None:
        """Bring weights into the order of `forward` for all its calls with them, until they are given here again."""
        self.kept = aligned(self.packed_size) if self.kept is None else self.kept
        self.pack(weights, self.kept)
        self._kept_at = address_of(weights)

    def use_kept_for(self, given: Any) -> None:
        """Let calls with the weights `given` use those that `keep` has had last, and no others."""
        self._kept_at = address_of(given)

    def kept_for(self, weights: Any) -> Any:
        """The weights in the order of `forward` if `keep` has had them, else None."""
        return self.kept if self.kept is not None and self._kept_at == address_of(weights) else None

    def _padded(self, x: Any, padding: Padding) -> Iterator[tuple[slice, slice, Any]]:
        """The images in order, a chunk at a time: (which images, which of their groups, their padded form)."""
        images = x.shape[0]
        chunk = CHUNK if padding.groups == 1 else self.threads * CHUNK_GROUPS
        step = images if not padding.needed else max(1, chunk // padding.elements)
        many = padding.groups if step > 1 else max(1, min(padding.groups, CHUNK // padding.group))
        for first in range(0, images, step):
            some = slice(first, min(first + step, images))
            if not padding.needed:
                yield some, EVERY, x[some]
                continue
            for group in range(0, padding.groups, many):
                groups = slice(group, min(group + many, padding.groups))
                size = (some.stop - first) * (groups.stop - group) * padding.group
                padded = self.workspace.take("images", size + WIDTH)
                padding.write(self.threads, x[some], padded, groups)
                yield some, groups if padding.groups > 1 else EVERY, padded

    # -- gradient of the image ----------------------------------------------------------------------

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        if has_few_channels(self.shape):
            if self._few is None:
                self._few = FewChannelsGradient(self.shape, self.threads, self.workspace)
            self._few.run(dy, weights, self.zeros, dx)
            return
        if self._backward is None:
            self._backward = _plan_backward(self.shape)
        parts = pack_all(self._backward, self.threads, self.workspace, weights, self.shape.group_step)
        phases, padding = list(zip(self._backward, parts, strict=True)), self._backward[0].padding
        step = dx.shape[0] if len(phases) == 1 else max(1, self.threads * CACHED // (dx.size // dx.shape[0]))
        for chunk, groups, padded in self._padded(dy, padding):
            for at in range(chunk.start, chunk.stop, step):  # phases write the same lines, which stay in a cache
                some = slice(at, min(at + step, chunk.stop))
                images = padded[some.start - chunk.start :]
                if padding.needed:
                    images = padded[(some.start - chunk.start) * padding.elements :]
                for phase, packed in phases:
                    phase.run(
                        self.threads, some.stop - at, images, packed, self.zeros, dx[some], None, groups
                    )  # fmt: skip

    # -- gradient of the weights --------------------------------------------------------------------

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        if self._gradient is None:
            self._gradient = WeightGradient(self.shape, self.threads, self.workspace)
        for some, groups, padded in self._padded(x, self.shape.padding):
            self._gradient.add(padded, dy[some], dweights, accumulate, some.start == 0, groups)
        self._gradient.finish(dweights, accumulate)


def _plan_forward(shape: ConvolutionShape) -> Correlation:
    g = shape.geometry
    h, w = np.meshgrid(shape.line_rows, np.arange(shape.out_width) * g.stride[-1], indexing="ij")
    pixels = Pixels(h.reshape(-1), w.reshape(-1), np.arange(h.size) * shape.outputs, h.size * shape.outputs)
    filters = Filters(np.arange(shape.depth), shape.depth, shape.group_outputs, g.group)
    return Correlation(shape.padding, shape.taps, pixels, filters)


def _plan_backward(shape: ConvolutionShape) -> list[Correlation]:
    axes = [axis_phases(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]
    reaches = [reach(phases, size) for phases, size in zip(axes, shape.out, strict=True)]
    before, padded = tuple(zeros for zeros, _ in reaches), tuple(size for _, size in reaches)
    padding = Padding(shape.out, shape.outputs, before, padded, shape.apart)
    kernel = shape.geometry.kernel
    rows = [
        merged_axes(parts, shape.sizes[:-1], kernel[:-1], before[:-1], padded[:-1])
        for parts in itertools.product(*axes[:-1])
    ]
    columns = [merged_axes((axis,), shape.sizes[-1:], kernel[-1:], before[-1:], padded[-1:]) for axis in axes[-1]]
    return [_plan_phase(shape, padding, h, w) for h in rows for w in columns]


def _plan_phase(shape: ConvolutionShape, padding: Padding, h: Axis, w: Axis) -> Correlation:
    outputs, kernel_w = shape.group_outputs, shape.geometry.kernel[-1]
    whole = len(w.shifts) > 0 and bool(np.all(np.diff(w.shifts) == 1))
    length = len(w.taps) if whole else 1
    shifts = np.meshgrid(h.shifts, w.shifts[::length], indexing="ij")
    taps = Taps(shifts[0].reshape(-1), shifts[1].reshape(-1), length, outputs)
    tap = h.taps[:, None] * kernel_w + w.taps[None, :]
    weight_rows = tap.reshape(-1, 1) * shape.group_channels + np.arange(outputs)[None, :] * shape.depth
    at_h, at_w = np.meshgrid(h.indices, w.indices, indexing="ij")
    y_at = (h.pixels[:, None] * shape.sizes[-1] + w.pixels[None, :]) * shape.channels
    pixels = Pixels(at_h.reshape(-1), at_w.reshape(-1), y_at, math.prod(shape.sizes) * shape.channels)
    return Correlation(padding, taps, pixels, Filters(weight_rows, 1, shape.group_channels, shape.geometry.group))
