"""Convolution over two spatial axes on the CPU, channels last, straight from the (padded) image.

With channels last, the elements of one kernel row that meet an output pixel lie next to each other, so a tile of
output pixels by output channels is a sum over kernel rows of small matrix products that read the image in place: no
columns are written (im2col), which would cost as much memory traffic as the products themselves. The gradient of the
image is the same sum over the padded gradient of the output, once for each phase of the stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Correlation, Padding, Taps
from caffepy.backend.cpu.convolution.weight_gradient import WeightGradient
from caffepy.backend.cpu.jit.runtime import ConstantTable
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry, spatial_output

CHUNK = 8 * 2**20
"""Elements of padded images made at a time, so that the workspace does not grow with the batch."""


class TileConvolution:
    """A planned convolution over two spatial axes.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, H, W).
        weights_shape: (num_output, C / group, kernel_h, kernel_w).
        geometry: how the windows move.
    """

    gives_sums = False

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        self.threads, self.workspace, self.geometry = threads, workspace, geometry
        self.images, self.channels, self.height, self.width = x_shape
        self.outputs, self.group_channels = weights_shape[:2]
        self.out_height, self.out_width = (
            spatial_output(x_shape[2 + i], *(v[i] for v in self.moves())) for i in (0, 1)
        )
        self.group_outputs = self.outputs // geometry.group
        self.depth = math.prod(weights_shape[1:])
        self.group_step = self.group_outputs * self.depth
        self.padding = Padding(
            self.height, self.width, self.channels, geometry.pad[0], geometry.pad[1],
            self.height + 2 * geometry.pad[0], self.width + 2 * geometry.pad[1],
        )  # fmt: skip
        self.zeros = ConstantTable(np.zeros(max(self.outputs, self.channels), np.float32))
        self.taps = self._make_taps()
        self._forward: Correlation | None = None
        self._backward: list[Correlation] | None = None
        self._gradient: WeightGradient | None = None

    def moves(self) -> tuple[tuple[int, ...], ...]:
        g = self.geometry
        return g.kernel, g.stride, g.pad, g.dilation

    def _make_taps(self) -> Taps:
        """Whole kernel rows where their elements lie next to each other in the image, else single kernel elements."""
        g = self.geometry
        whole = g.group == 1 and (g.dilation[1] == 1 or g.kernel[1] == 1)
        length = g.kernel[1] if whole else 1
        rows, columns = np.arange(g.kernel[0]) * g.dilation[0], np.arange(0, g.kernel[1], length) * g.dilation[1]
        rows, columns = (v.reshape(-1) for v in np.meshgrid(rows, columns, indexing="ij"))
        return Taps(rows, columns, length, self.group_channels)

    # -- forward ------------------------------------------------------------------------------------

    def _plan_forward(self) -> Correlation:
        g, p = self.geometry, self.padding
        h, w = np.meshgrid(
            np.arange(self.out_height) * g.stride[0] - p.top, np.arange(self.out_width) * g.stride[1] - p.left,
            indexing="ij",
        )  # fmt: skip
        return Correlation(
            p, h.reshape(-1), w.reshape(-1), self.taps, np.arange(self.depth), self.depth,
            np.arange(h.size) * self.outputs, h.size * self.outputs, self.group_outputs, g.group,
        )  # fmt: skip

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        """y = weights * x (+ bias), or max(that, 0)."""
        assert sums is None, "gives no sums"
        if self._forward is None:
            self._forward = self._plan_forward()
        start = self.zeros if bias is None else bias
        packed = self._forward.pack(self.threads, weights, self.group_step, self.workspace)
        for first, stop, padded in self._padded(x, self.padding):
            self._forward.run(self.threads, stop - first, padded, packed, start, y[first:stop])
        if relu:
            np.maximum(y, 0, out=y)

    def _padded(self, x: Any, padding: Padding) -> Any:
        """The images in order, a chunk at a time: (first, stop, their padded form)."""
        images = x.shape[0]
        step = images if not padding.needed else max(1, CHUNK // padding.elements)
        for first in range(0, images, step):
            part = x[first : first + step]
            if padding.needed:
                padded = self.workspace.take("images", part.shape[0] * padding.elements + WIDTH)
                padding.write(self.threads, part, padded)
                part = padded
            yield first, min(first + step, images), part

    # -- gradient of the image ----------------------------------------------------------------------

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        """dx = the transposed convolution of dy with weights."""
        if self._backward is None:
            self._backward = _plan_backward(self)
        for first, stop, padded in self._padded(dy, self._backward[0].padding):
            for phase in self._backward:
                packed = phase.pack(self.threads, weights, self.group_step, self.workspace)
                phase.run(self.threads, stop - first, padded, packed, self.zeros, dx[first:stop])

    # -- gradient of the weights --------------------------------------------------------------------

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy."""
        if self._gradient is None:
            self._gradient = WeightGradient(self)
        for first, stop, padded in self._padded(x, self.padding):
            self._gradient.run(padded, dy[first:stop], dweights, accumulate or first > 0)


@dataclass(frozen=True)
class _Axis:
    """Which pixels of the image along one axis belong to one phase of the stride, and which taps reach them.

    A pixel h of the image with h + pad = stride i + phase gets from tap k the output pixel
    i + (phase - k dilation) / stride.
    """

    pixels: Any
    indices: Any
    taps: list[int]
    shifts: list[int]


def _axis_phases(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[_Axis]:
    phases = []
    for phase in range(stride):
        pixels = np.array([h for h in range(size) if (h + pad) % stride == phase], np.int64)
        taps = [k for k in range(kernel) if (phase - k * dilation) % stride == 0]
        taps.sort(key=lambda k: -k)
        shifts = [(phase - k * dilation) // stride for k in taps]
        if len(pixels):
            phases.append(_Axis(pixels, (pixels + pad) // stride, taps, shifts))
    return phases


def _reach(phases: list[_Axis], size: int) -> tuple[int, int]:
    """(zeros needed before, padded size) so that every tap of every phase stays inside."""
    low = min([p.indices[0] + min(p.shifts) for p in phases if p.shifts], default=0)
    high = max([p.indices[-1] + max(p.shifts) for p in phases if p.shifts], default=0)
    before = max(0, -int(low))
    return before, before + max(size, int(high) + 1)


def _plan_backward(plan: TileConvolution) -> list[Correlation]:
    moves = list(zip(*plan.moves(), strict=True))
    rows = _axis_phases(plan.height, *moves[0])
    columns = _axis_phases(plan.width, *moves[1])
    top, padded_height = _reach(rows, plan.out_height)
    left, padded_width = _reach(columns, plan.out_width)
    padding = Padding(plan.out_height, plan.out_width, plan.outputs, top, left, padded_height, padded_width)
    return [_plan_phase(plan, padding, h, w) for h in rows for w in columns]


def _plan_phase(plan: TileConvolution, padding: Padding, h: _Axis, w: _Axis) -> Correlation:
    outputs, kernel_w = plan.group_outputs, plan.geometry.kernel[1]
    whole = plan.geometry.group == 1 and bool(w.shifts) and bool(np.all(np.diff(w.shifts) == 1))
    length = len(w.taps) if whole else 1
    shifts = np.meshgrid(np.array(h.shifts, np.int64), np.array(w.shifts[::length], np.int64), indexing="ij")
    taps = Taps(shifts[0].reshape(-1), shifts[1].reshape(-1), length, outputs)
    tap = np.array(h.taps, np.int64)[:, None] * kernel_w + np.array(w.taps, np.int64)[None, :]
    weight_rows = tap.reshape(-1, 1) * plan.group_channels + np.arange(outputs)[None, :] * plan.depth
    at_h, at_w = np.meshgrid(h.indices, w.indices, indexing="ij")
    y_at = (h.pixels[:, None] * plan.width + w.pixels[None, :]) * plan.channels
    return Correlation(
        padding, at_h.reshape(-1), at_w.reshape(-1), taps, weight_rows, 1, y_at,
        plan.height * plan.width * plan.channels, plan.group_channels, plan.geometry.group,
    )  # fmt: skip
