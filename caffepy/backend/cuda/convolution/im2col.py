"""Convolutions as matrix products over unrolled windows: any number of axes, groups and dilation, any dtype.

This candidate supports every task. In channels-last memory, the windows of many images times the weights are one matrix
product per group. Behaviour: Caffe's `base_conv_layer.cpp`.
"""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, launch, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_product, is_whole_image
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.expression import apply
from caffepy.backend.formulas import identity
from caffepy.backend.types import Array

COLUMNS_LIMIT = 2**26
"""Maximum elements of the column buffer; larger batches, and larger images, are computed in parts."""


def _channels_last(array: Array) -> Array:
    """Return the array as contiguous (N, spatial..., C): a view of an image, a copy of other arrays."""
    turned = array.transpose(0, *range(2, array.ndim), 1)
    return turned if turned.flags.c_contiguous else cupy.ascontiguousarray(turned)


class Im2colConvolution:
    """The candidate that supports every task.

    Args:
        task: a plain task.
        resources: cuBLAS and scratch memory.
    """

    name = "products"

    def __init__(self, task: Task, resources: Resources) -> None:
        problem = task.problem
        self._task = task
        self._problem = problem
        self._resources = resources
        self._blas = resources.blas
        geometry = problem.geometry
        self._group = geometry.group
        self._channels = problem.x[1] // geometry.group
        self._outputs = problem.weights[0] // geometry.group
        self._pixels = math.prod(problem.y[2:])
        self._columns = math.prod(geometry.kernel) * self._channels
        self._defines = _defines(problem, cupy.dtype(problem.array_dtype).char)
        self._whole_image = is_whole_image(problem)
        self._is_product = is_product(problem)
        limit = COLUMNS_LIMIT // max(self._columns, 1)
        self._batch = problem.x[0] if self._is_product else max(1, min(problem.x[0], limit // max(self._pixels, 1)))
        self._slab = max(1, self._pixels if self._is_product else min(self._pixels, limit))
        """Windows of an image that are unrolled together; fewer than all if those of one image exceed the limit."""

    def prepare(self) -> bool:
        return True

    def run(self, operands: Operands) -> None:
        """Iterate over the batch in parts, and over the groups of each part."""
        out = operands.out
        a, b, result = _channels_last(operands.first), _channels_last(operands.second), _channels_last(out)
        if self._is_product and self._group > 1:
            self._all_groups(a, b, result, operands.accumulate)
        else:
            self._each_group(a, b, result, operands.accumulate)
        # `_channels_last` has copied arrays that are not stored channels last.
        if result.data.ptr != out.data.ptr:
            cupy.copyto(out, result.transpose(0, out.ndim - 1, *range(1, out.ndim - 1)))

    def _all_groups(self, a: Array, b: Array, result: Array, accumulate: bool) -> None:
        """Compute pointwise convolutions: the products of all groups in one launch."""
        group, gemm = self._group, self._blas.gemm_of_parts
        if self._task.direction is Direction.WEIGHTS:
            target = result.reshape(group, self._outputs, self._columns)
            gemm(_groups_of(b, group), _groups_of(a, group), target, True, False, accumulate)
            return
        weights, forward = b.reshape(group, self._outputs, self._columns), self._task.direction is Direction.FORWARD
        gemm(_groups_of(a, group), weights, _groups_of(result, group), False, forward, False)

    def _each_group(self, a: Array, b: Array, result: Array, accumulate: bool) -> None:
        """Compute the products of each part of the batch and each group."""
        direction = self._task.direction
        for start in range(0, self._problem.x[0], self._batch):
            part = slice(start, min(start + self._batch, self._problem.x[0]))
            for group in range(self._group):
                if direction is Direction.FORWARD:
                    self._forward(a[part], b, result[part], group)
                elif direction is Direction.DATA:
                    self._backward_data(a[part], b, result[part], group)
                else:
                    self._backward_weights(a[part], b[part], result, group, start > 0 or accumulate)

    def _slabs(self, images: int) -> list[slice]:
        """Return the windows of each product: those of all images, or some of those of one image."""
        if self._slab == self._pixels:
            return [slice(0, images * self._pixels)]
        return [slice(at, min(at + self._slab, self._pixels)) for at in range(0, self._pixels, self._slab)]

    def _scratch_windows(self, windows: slice, dtype: str) -> Array:
        count = windows.stop - windows.start
        return self._resources.scratch.get("unrolled windows", count * self._columns, dtype).reshape(count, -1)

    def _windows(self, x: Array, group: int, windows: slice) -> Array:
        """Return windows of images, one per row; the images themselves if a window is a pixel or an image."""
        if self._is_product:
            return self._pixels_or_images(x, group)
        columns = self._scratch_windows(windows, self._problem.array_dtype)
        kernel = library_kernel("im2col", "im2col", self._defines)
        first = group * self._channels
        launch(kernel, columns.size, (x, columns, first, windows.start, columns.size))
        return columns

    def _pixels_or_images(self, x: Array, group: int) -> Array:
        if self._whole_image:
            return x.reshape(x.shape[0], self._columns)
        return _columns_of(x, group, self._channels)

    def _weights(self, weights: Array, group: int) -> Array:
        flat = weights.reshape(weights.shape[0], self._columns)
        return flat[group * self._outputs : (group + 1) * self._outputs]

    def _forward(self, x: Array, weights: Array, y: Array, group: int) -> None:
        out, own = _columns_of(y, group, self._outputs), self._weights(weights, group)
        for windows in self._slabs(x.shape[0]):
            self._blas.gemm(self._windows(x, group, windows), own, out[windows], False, True, False)

    def _backward_data(self, dy: Array, weights: Array, dx: Array, group: int) -> None:
        gradient, own = _columns_of(dy, group, self._outputs), self._weights(weights, group)
        if self._is_product:
            self._blas.gemm(gradient, own, self._pixels_or_images(dx, group), False, False, False)
            return
        slabs, first, sums = self._slabs(dx.shape[0]), group * self._channels, dx
        if len(slabs) > 1:
            if dx.dtype != np.float32:
                sums = self._resources.scratch.get("image gradient", dx.size, "float32").reshape(dx.shape)
            _columns_of(sums, group, self._channels).fill(0)
        kernel = library_kernel("im2col", "col2im", _defines(self._problem, sums.dtype.char))
        for windows in slabs:
            # In float32: `col2im` adds up to a window's elements for each pixel, and rounds their sum once.
            columns = self._scratch_windows(windows, "float32")
            self._blas.gemm(gradient[windows], own, columns, False, False, False)
            begin, end = self._pixels_of(windows) if len(slabs) > 1 else (0, dx.size // dx.shape[-1])
            count = (end - begin) * self._channels
            numbers = (first, begin, windows.start, windows.stop, int(len(slabs) > 1), count)
            launch(kernel, count, (columns, sums, *numbers))
        if sums is not dx and group == self._group - 1:
            apply(identity, (sums.reshape(-1),), (dx.reshape(-1),), axis=0)

    def _pixels_of(self, windows: slice) -> tuple[int, int]:
        """Return the first pixel of an image that windows of it may contain, and the end of these pixels."""
        problem, g = self._problem, self._problem.geometry
        plane = math.prod(problem.y[3:])
        rows = [at // plane * g.stride[0] - g.pad[0] for at in (windows.start, windows.stop - 1)]
        begin, end = max(rows[0], 0), min(rows[1] + g.dilation[0] * (g.kernel[0] - 1) + 1, problem.x[2])
        pixels = math.prod(problem.x[3:])
        return begin * pixels, max(begin, end) * pixels

    def _backward_weights(self, x: Array, dy: Array, dweights: Array, group: int, accumulate: bool) -> None:
        gradient, target = _columns_of(dy, group, self._outputs), self._weights(dweights, group)
        for windows in self._slabs(x.shape[0]):
            unrolled = self._windows(x, group, windows)
            self._blas.gemm(gradient[windows], unrolled, target, True, False, accumulate or windows.start > 0)


def _columns_of(array: Array, group: int, width: int) -> Array:
    """Return a group's channels of a channels-last array as a matrix with one row per pixel."""
    return array.reshape(-1, array.shape[-1])[:, group * width : (group + 1) * width]


def _groups_of(array: Array, number: int) -> Array:
    """Return a channels-last array as one matrix per group with one row per pixel; a view."""
    return array.reshape(-1, number, array.shape[-1] // number).transpose(1, 0, 2)


def _defines(problem: Problem, char: str) -> str:
    """Return the constants that kernels/im2col.cu requires; `char`: the dtype of images."""
    g = problem.geometry
    values = {
        "SIZE": problem.x[2:],
        "OUT": problem.y[2:],
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PAD": g.pad,
        "DILATION": g.dilation,
    }
    lines = [f"#define Element {C_TYPES[char]}", f"#define AXES {len(g.kernel)}", f"#define CHANNELS {problem.x[1]}"]
    lines.append(f"#define GROUP_CHANNELS {problem.x[1] // g.group}")
    for name, numbers in values.items():
        lines.append(f"__device__ constexpr int {name}[AXES] = {{{', '.join(map(str, numbers))}}};")
    return "\n".join(lines) + "\n"
