"""Direct convolution on the CPU, channels last, from the (padded) image.

With channels last, the elements of a kernel row that an output pixel reads are contiguous. A tile of output pixels by
output channels is therefore a sum over kernel rows of small matrix products that read the image in place. No columns
are written (im2col), which would cost as much memory traffic as the products. The data gradient is the same sum over
the output's gradient. Images are read without padding (`unpadded.py`) for groups, for the data gradient with a
stride, and if pixels with equal taps fill the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.axes import Axis, axis_residues, merged_axes, reach
from caffepy.backend.cpu.convolution.correlation import (
    ConvolutionShape,
    Correlation,
    Ending,
    Filters,
    Padding,
    Pixels,
    Taps,
)
from caffepy.backend.cpu.convolution.unpadded import GroupWeightGradient, WindowCorrelation
from caffepy.backend.cpu.convolution.weight_gradient import WeightGradient
from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.kernel import ConstantTable
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.memory import Workspace, aligned
from caffepy.backend.types import Geometry

CHUNK = 8 * 2**20
"""Elements of padded images per chunk, so that the workspace grows with neither batch nor image."""
MIN_GROUPED_PIXELS = 128
"""Minimum output pixels of all images for the grouped weight gradient; with fewer, transposing its result takes longer
than copying the image."""

FILLED = 0.9
"""Minimum share of used tile rows for reading images without a padded copy."""


class TileConvolution:
    """A planned convolution over two or more spatial axes of channels-last arrays.

    Args:
        threads: the backend's threads.
        workspace: the backend's workspace.
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: window geometry.
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
        self._forward: Correlation | WindowCorrelation | None = None
        self._backward: Correlation | WindowCorrelation | None = None
        self._gradient: WeightGradient | None = None
        self._group_gradient: GroupWeightGradient | None = None

    # -- forward ------------------------------------------------------------------------------------

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        plan, start, packed = self._planned(), self.zeros if bias is None else bias, self.packed(weights)
        if isinstance(plan, WindowCorrelation):
            plan.run(self.threads, x.shape[0], x, packed, start, y, Ending(residual, relu))
            return
        for some, padded in self._padded(x, self.shape.padding):
            ending = Ending(None if residual is None else residual[some], relu)
            plan.run(self.threads, some.stop - some.start, padded, packed, start, y[some], ending)

    def _planned(self) -> Correlation | WindowCorrelation:
        if self._forward is None:
            unpadded = self.shape.padding.needed or self.shape.geometry.group > 1
            self._forward = (self._unpadded(back=False) if unpadded else None) or _plan_forward(self.shape)
        return self._forward

    def _unpadded(self, back: bool) -> WindowCorrelation | None:
        """Return a plan without a padded copy if it uses enough rows of its tiles, or if there is no alternative."""
        plan = WindowCorrelation(self.shape, back)
        only = self.shape.geometry.group > 1 or (back and max(self.shape.geometry.stride) > 1)
        return plan if only or plan.filled(self.shape.images) >= FILLED else None

    @property
    def packed_size(self) -> int:
        """Elements of the weights packed for `forward`."""
        return self._planned().packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        """Pack weights for `forward`."""
        self._planned().pack(self.threads, weights, self.shape.group_step, packed)

    def packed(self, weights: Any) -> Any:
        """Return weights packed for `forward`: the cached ones, or packed for this pass."""
        packed = self.kept_for(weights)
        if packed is None:
            packed = self.workspace.take("weights", self.packed_size)
            self.pack(weights, packed)
        return packed

    def keep(self, weights: Any) -> None:
        """Cache packed weights for all `forward` calls with them, until the next `keep` of these weights."""
        self.kept = aligned(self.packed_size) if self.kept is None else self.kept
        self.pack(weights, self.kept)
        self._kept_at = address_of(weights)

    def use_kept_for(self, given: Any) -> None:
        """Use the last cached weights for calls with the weights `given`, and only for these."""
        self._kept_at = address_of(given)

    def kept_for(self, weights: Any) -> Any:
        """Return the cached packed weights of `weights`, or None."""
        return self.kept if self.kept is not None and self._kept_at == address_of(weights) else None

    def _padded(self, x: Any, padding: Padding) -> Iterator[tuple[slice, Any]]:
        """Yield the images chunk by chunk: (slice of images, their padded form)."""
        images = x.shape[0]
        step = max(1, CHUNK // padding.elements) if padding.needed else images
        for first in range(0, images, step):
            some = slice(first, min(first + step, images))
            if not padding.needed:
                yield some, x[some]
                continue
            padded = self.workspace.take("images", (some.stop - first) * padding.elements + WIDTH)
            padding.write(self.threads, x[some], padded)
            yield some, padded

    # -- data gradient --------------------------------------------------------------------------------

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        if self._backward is None:
            self._backward = self._unpadded(back=True) or _plan_backward(self.shape)
        plan, packed = self._backward, self.workspace.take("weights", self._backward.packed_size)
        plan.pack(self.threads, weights, self.shape.group_step, packed)
        if isinstance(plan, WindowCorrelation):
            plan.run(self.threads, dy.shape[0], dy, packed, self.zeros, dx)
            return
        for some, padded in self._padded(dy, plan.padding):
            plan.run(self.threads, some.stop - some.start, padded, packed, self.zeros, dx[some])

    # -- weight gradient ------------------------------------------------------------------------------

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        if self.shape.scattered and self.shape.pixels >= MIN_GROUPED_PIXELS:
            if self._group_gradient is None:
                self._group_gradient = GroupWeightGradient(self.shape, self.threads, self.workspace)
            self._group_gradient.run(x, dy, dweights, accumulate)
            return
        if self._gradient is None:
            self._gradient = WeightGradient(self.shape, self.threads, self.workspace)
        for some, padded in self._padded(x, self.shape.padding):
            self._gradient.add(padded, dy[some], dweights, accumulate, some.start == 0)
        self._gradient.finish(dweights, accumulate)


def _plan_forward(shape: ConvolutionShape) -> Correlation:
    g = shape.geometry
    h, w = np.meshgrid(shape.line_rows, np.arange(shape.out_width) * g.stride[-1], indexing="ij")
    pixels = Pixels(h.reshape(-1), w.reshape(-1), np.arange(h.size) * shape.outputs, h.size * shape.outputs)
    filters = Filters(np.arange(shape.depth), shape.depth, shape.group_outputs, g.group)
    return Correlation(shape.padding, shape.taps, pixels, filters)


def _plan_backward(shape: ConvolutionShape) -> Correlation:
    """Plan the data gradient of a convolution without a stride."""
    axes = [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]
    reaches = [reach(residues, size) for residues, size in zip(axes, shape.out, strict=True)]
    before, padded = tuple(zeros for zeros, _ in reaches), tuple(size for _, size in reaches)
    padding = Padding(shape.out, shape.outputs, before, padded)
    kernel, one = shape.geometry.kernel, [residues[0] for residues in axes]
    h = merged_axes(one[:-1], shape.sizes[:-1], kernel[:-1], before[:-1], padded[:-1])
    w = merged_axes(one[-1:], shape.sizes[-1:], kernel[-1:], before[-1:], padded[-1:])
    return _plan_residue(shape, padding, h, w)


def _plan_residue(shape: ConvolutionShape, padding: Padding, h: Axis, w: Axis) -> Correlation:
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
