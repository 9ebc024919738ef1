"""LSTM gates on the CPU."""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cpu.jit.kernel import Floats, Int, device_function, kernel
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import RecurrentPrimitives
from caffepy.backend.types import Array

GRAIN = 2048
"""Minimum elements of the hidden state for a second thread."""


@device_function
def _sigmoid(x: Any) -> Any:
    return 1 / (1 + math.exp(-x))


@device_function
def _continued(value: Any, cont: Any) -> Any:
    """Return 0 at the start of a sequence, even if the value is not finite."""
    return value * cont if cont != 0 else cont


@kernel
def unit_forward(
    begin: Int,
    end: Int,
    gates: Floats,
    cell_before: Floats,
    cont: Floats,
    cell: Floats,
    hidden: Floats,
    size: Int,
) -> None:
    """Items are streams; `size` is the length of a hidden state."""
    for n in range(begin, end):
        part, row = 4 * n * size, n * size
        for d in range(size):
            i = _sigmoid(gates[part + d])
            f = _sigmoid(gates[part + size + d])
            o = _sigmoid(gates[part + 2 * size + d])
            g = math.tanh(gates[part + 3 * size + d])
            value = _continued(f * cell_before[row + d], cont[n]) + i * g
            gates[part + d] = i
            gates[part + size + d] = f
            gates[part + 2 * size + d] = o
            gates[part + 3 * size + d] = g
            cell[row + d] = value
            hidden[row + d] = o * math.tanh(value)


@kernel
def unit_backward(
    begin: Int,
    end: Int,
    gates: Floats,
    cell_before: Floats,
    cont: Floats,
    cell: Floats,
    d_cell: Floats,
    d_hidden: Floats,
    size: Int,
) -> None:
    """Items are streams."""
    for n in range(begin, end):
        part, row = 4 * n * size, n * size
        for d in range(size):
            i, f, o, g = gates[part + d], gates[part + size + d], gates[part + 2 * size + d], gates[part + 3 * size + d]
            rounded, dh = math.tanh(cell[row + d]), d_hidden[row + d]
            dc = d_cell[row + d] + dh * o * (1 - rounded * rounded)
            gates[part + d] = dc * g * i * (1 - i)
            gates[part + size + d] = dc * _continued(cell_before[row + d], cont[n]) * f * (1 - f)
            gates[part + 2 * size + d] = dh * rounded * o * (1 - o)
            gates[part + 3 * size + d] = dc * i * (1 - g * g)
            d_cell[row + d] = dc * f * cont[n]


class CpuRecurrent(RecurrentPrimitives, CpuMemory):
    """`RecurrentPrimitives` of the CPU."""

    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        streams, size = cell.shape
        unit_forward.run(self.threads, streams, GRAIN // max(size, 1), gates, cell_before, cont, cell, hidden, size)

    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        streams, size = cell.shape
        arrays = (gates, cell_before, cont, cell, d_cell, d_hidden)
        unit_backward.run(self.threads, streams, GRAIN // max(size, 1), *arrays, size)
