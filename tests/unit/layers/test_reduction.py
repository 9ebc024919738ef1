"""Reduction: all operations, axes and factors."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import check_layer, spread

OPERATIONS = {
    "SUM": lambda x, axes: x.sum(axes),
    "ASUM": lambda x, axes: np.abs(x).sum(axes),
    "SUMSQ": lambda x, axes: (x * x).sum(axes),
    "MEAN": lambda x, axes: x.mean(axes),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 3, 4, 5), 0), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), 2), ((2, 3, 4, 5), -1), ((3, 4), -2), ((6,), 0),
     ((2, 3, 4), 1), ((2, 3, 2, 2, 2), 4), ((2, 3, 2, 2, 2), -4)],
)  # fmt: skip
def test_reduction(operation, shape, axis):
    axes = tuple(range(axis % len(shape), len(shape)))
    for coeff in (1, -0.5):
        text = f"type: 'Reduction' reduction_param {{ operation: {operation} axis: {axis} coeff: {coeff} }}"
        check_layer(text, [spread(shape)], lambda x, c=coeff: c * OPERATIONS[operation](x, axes))


def test_sign_of_zero_is_zero():
    from layer_harness import Runner

    runner = Runner("type: 'Reduction' reduction_param { operation: ASUM }", [np.array([0, -2, 3], np.float32)])
    runner.forward()
    assert np.array_equal(runner.backward([np.float32(2)])[0], [0, -2, 2])
