"""Checks of products with a formula of their elements: any backend and dtype, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from backend_checks import dirty, normal, to_device

from caffepy.backend import Backend, Expression
from caffepy.layers.activation.sigmoid import sigmoid_with_channel, tanh_with_channel
from caffepy.layers.core.formulas import total_with_channel

FORMULAS: dict[str, tuple[Expression, Any]] = {
    "sum": (total_with_channel, lambda x: x),
    "sigmoid": (sigmoid_with_channel, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (tanh_with_channel, np.tanh),
}
"""Formulas of a product and its column's number, and what they make of the sum of the two."""

SIZES = [
    (100, 30, 250),
    (100, 250, 30),
    (100, 500, 250),
    (7, 33, 40),
    (1, 1, 16),
    (1, 70, 64),
    (3, 5, 8),
    (64, 10, 500),
]
"""Rows, columns, depth: of small products and others, with wide loads and without."""


def check_gemm_and_apply(
    backend: Backend, sizes: tuple[int, int, int], formula: str, transposed: tuple[bool, bool], dtype: str, far: float
) -> None:
    """Factors of one dtype, the result in that and in float32; columns differ by more than `far`."""
    rows, columns, depth = sizes
    expression, function = FORMULAS[formula]
    hosts = [normal(1, (rows, depth)) / np.sqrt(depth), normal(2, (depth, columns))]
    bias = np.linspace(-2, 2, columns, dtype=np.float32)
    arrays = [
        to_device(backend, np.ascontiguousarray(host.T if turned else host), dtype)
        for host, turned in zip(hosts, transposed, strict=True)
    ]
    a, b = (
        backend.to_host(array).astype(float).T if turned else backend.to_host(array).astype(float)
        for array, turned in zip(arrays, transposed, strict=True)
    )
    expected = function(a @ b + bias)
    channel = to_device(backend, bias)
    for kind in sorted({"float32", dtype}):
        out = dirty(backend, (rows, columns), kind)
        backend.gemm_and_apply(expression, *arrays, channel, out, *transposed)
        first = backend.to_host(out)
        assert np.abs(first - expected).max() <= far * max(1.0, np.abs(expected).max()), (kind, sizes)
        backend.gemm_and_apply(expression, *arrays, channel, out, *transposed)
        assert np.array_equal(backend.to_host(out), first)
