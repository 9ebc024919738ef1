"""Convolutions over one, three or more spatial axes, whose arrays lie in memory as (N, C, spatial...).

They are brought into the order with the channels last, where all convolutions are computed, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, turn_square
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.handles import Convolution
from caffepy.backend.types import Geometry


@kernel
def turn(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, target: Floats, rows: Int, columns: Int, blocks: Int, width: Int,
    accumulate: Int,
) -> None:  # fmt: skip
    """target[n, column, row] (+)= source[n, row, column]. Items are (n, block of `width` columns)."""
    for item in range(begin, end):
        base = (item // blocks) * rows * columns
        first = (item % blocks) * width
        stop = min(first + width, columns)
        whole = rows // width * width if accumulate == 0 and stop - first == width else 0
        for r in range(0, whole, width):
            turn_square(
                ahead(source, base + r * columns + first), columns, ahead(target, base + first * rows + r), rows
            )
        for j in range(first, stop):
            for r in range(whole, rows):
                value = source[base + r * columns + j]
                at = base + j * rows + r
                target[at] = target[at] + value if accumulate == 1 else value


class PlainConvolution:
    """A planned convolution of arrays with the channels before the spatial axes: one, or more than three.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: how the windows move.
        plan: plans a convolution over two or more axes, channels last.
    """

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry, plan: Callable[..., Convolution],
    ) -> None:  # fmt: skip
        self._threads, self._workspace = threads, workspace
        if len(x_shape) == 3:
            g = geometry
            x_shape, weights_shape = (*x_shape[:2], 1, x_shape[2]), (*weights_shape[:2], 1, weights_shape[2])
            geometry = replace(
                g, kernel=(1, *g.kernel), stride=(1, *g.stride), pad=(0, *g.pad), dilation=(1, *g.dilation)
            )
        self._plan = plan(threads, workspace, x_shape, weights_shape, geometry)

    def _turn(self, source: Any, target: Any, sizes: tuple[int, int, int], accumulate: bool = False) -> None:
        count, rows, columns = sizes
        blocks = -(-columns // WIDTH)
        turn.run(
            self._threads, count * blocks, max(1, 1024 // max(1, rows)), source, target, rows, columns, blocks, WIDTH,
            int(accumulate),
        )  # fmt: skip

    def _buffer(self, array: Any, purpose: str) -> Any:
        return self._workspace.take(purpose, array.size)[: array.size].reshape(array.shape[0], -1)

    def _last(self, array: Any, purpose: str) -> Any:
        """An array's elements (N, C, ...) with the channels last."""
        result = self._buffer(array, purpose)
        self._turn(array, result, (array.shape[0], array.shape[1], math.prod(array.shape[2:])))
        return result

    def _first(self, result: Any, array: Any, accumulate: bool = False) -> None:
        """Bring a result with the channels last to where it belongs."""
        self._turn(result, array, (array.shape[0], math.prod(array.shape[2:]), array.shape[1]), accumulate)

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        out = self._buffer(y, "y last")
        self._plan.forward(self._last(x, "x last"), self._last(weights, "weights last"), bias, out, relu, sums)
        self._first(out, y)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        result = self._buffer(dx, "x last")
        self._plan.backward_data(self._last(dy, "y last"), self._last(weights, "weights last"), result)
        self._first(result, dx)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        result = self._buffer(dweights, "weights last")
        self._plan.backward_weights(self._last(x, "x last"), self._last(dy, "y last"), result, accumulate=False)
        self._first(result, dweights, accumulate)
