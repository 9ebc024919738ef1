"""Convolutions as matrix products over unrolled windows: any number of axes, groups and dilation, plain float32.

Owns the fallback for what cuDNN does not take. It works on channels-last copies, where one image's windows times the
weights is one matrix product per group. Behaviour: Caffe's `base_conv_layer.cpp`.
"""

from __future__ import annotations

import math

from caffepy.backend.base import Array
from caffepy.backend.cuda_convolution import Direction, Problem, Resources
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_kernels import launch, library_kernel

COLUMNS_LIMIT = 2**26
"""Elements of unrolled windows held at once; larger batches are taken in parts."""


def _channels_last(array: Array) -> Array:
    """The array as (N, spatial..., C), contiguous: a view for 4-D blobs, a copy for others."""
    return cupy.ascontiguousarray(array.transpose(0, *range(2, array.ndim), 1))


class Im2colConvolution:
    """The way that takes everything.

    Args:
        problem: the shapes.
        resources: cuBLAS and scratch memory.
    """

    name = "im2col and cuBLAS"

    def __init__(self, problem: Problem, resources: Resources) -> None:
        self._problem = problem
        self._blas = resources.blas
        self._scratch = resources.scratch
        geometry = problem.geometry
        self._group = geometry.group
        self._channels = problem.x[1] // geometry.group
        self._outputs = problem.weights[0] // geometry.group
        self._places = math.prod(problem.y[2:])
        self._columns = math.prod(geometry.kernel) * self._channels
        self._defines = _defines(problem)
        self._batch = max(1, min(problem.x[0], COLUMNS_LIMIT // max(self._places * self._columns, 1)))

    def prepare(self, direction: Direction) -> bool:
        """Always possible."""
        return True

    def run(self, direction: Direction, first: Array, second: Array, out: Array) -> None:
        """Go through the batch in parts, and through the groups of each."""
        a, b, result = _channels_last(first), _channels_last(second), _channels_last(out)
        for start in range(0, self._problem.x[0], self._batch):
            part = slice(start, min(start + self._batch, self._problem.x[0]))
            for group in range(self._group):
                if direction is Direction.FORWARD:
                    self._forward(a[part], b, result[part], group)
                elif direction is Direction.DATA:
                    self._backward_data(a[part], b, result[part], group)
                else:
                    self._backward_weights(a[part], b[part], result, group, accumulate=start > 0)
        if result.data.ptr != out.data.ptr:
            cupy.copyto(out, result.transpose(0, out.ndim - 1, *range(1, out.ndim - 1)))

    def _unrolled(self, images: int) -> Array:
        count = images * self._places * self._columns
        return self._scratch.get("unrolled windows", count).reshape(images * self._places, self._columns)

    def _kernel(self, name: str, source: Array, target: Array, group: int, count: int) -> None:
        kernel = library_kernel("im2col", name, self._defines)
        launch(kernel, count, (source, target, group * self._channels, count))

    def _weights(self, weights: Array, group: int) -> Array:
        flat = weights.reshape(weights.shape[0], self._columns)
        return flat[group * self._outputs : (group + 1) * self._outputs]

    def _outputs_of(self, y: Array, group: int) -> Array:
        flat = y.reshape(-1, y.shape[-1])
        return flat[:, group * self._outputs : (group + 1) * self._outputs]

    def _forward(self, x: Array, weights: Array, y: Array, group: int) -> None:
        columns = self._unrolled(x.shape[0])
        self._kernel("im2col", x, columns, group, columns.size)
        self._blas.gemm(columns, self._weights(weights, group), self._outputs_of(y, group), False, True, False)

    def _backward_data(self, dy: Array, weights: Array, dx: Array, group: int) -> None:
        columns = self._unrolled(dx.shape[0])
        self._blas.gemm(self._outputs_of(dy, group), self._weights(weights, group), columns, False, False, False)
        self._kernel("col2im", columns, dx, group, dx.size // self._group)

    def _backward_weights(self, x: Array, dy: Array, dweights: Array, group: int, accumulate: bool) -> None:
        columns = self._unrolled(x.shape[0])
        self._kernel("im2col", x, columns, group, columns.size)
        target = self._weights(dweights, group)
        self._blas.gemm(self._outputs_of(dy, group), columns, target, True, False, accumulate)


def _defines(problem: Problem) -> str:
    """The constants that kernels/im2col.cu expects before its text."""
    g = problem.geometry
    values = {
        "SIZE": problem.x[2:], "OUT": problem.y[2:], "KERNEL": g.kernel, "STRIDE": g.stride, "PAD": g.pad,
        "DILATION": g.dilation,
    }  # fmt: skip
    lines = [f"#define AXES {len(g.kernel)}", f"#define CHANNELS {problem.x[1]}"]
    lines.append(f"#define GROUP_CHANNELS {problem.x[1] // g.group}")
    for name, numbers in values.items():
        lines.append(f"__device__ constexpr int {name}[AXES] = {{{', '.join(map(str, numbers))}}};")
    return "\n".join(lines) + "\n"
