"""Sparse linear maps between the pixels of two images, the same for all samples and channels."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from caffepy.backend import Array, Backend, SparseMatrix


class SpatialMap:
    """y[n, c] = M x[n, c], and its gradient.

    Args:
        backend: holds the matrix.
        shape: (pixels of y, pixels of x).
        rows: the pixel of y of each entry of M.
        columns: the pixel of x of each entry.
        weights: the value of each entry; None: 1.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, int], rows: Any, columns: Any, weights: Any | None = None
    ) -> None:
        self._backend = backend
        self._shape = shape
        self._entries = (np.ravel(rows), np.ravel(columns))
        self._weights = np.ones(len(self._entries[0]), np.float32) if weights is None else np.ravel(weights)
        self._forward = self._matrix(*self._entries, shape)

    @cached_property
    def _backward(self) -> SparseMatrix:
        return self._matrix(*self._entries[::-1], self._shape[::-1])

    def _matrix(self, rows: Any, columns: Any, shape: tuple[int, int]) -> SparseMatrix:
        order = np.lexsort((columns, rows))
        begins = np.searchsorted(rows[order], np.arange(shape[0] + 1))
        arrays = []
        for values, dtype in ((begins, "int32"), (columns[order], "int32"), (self._weights[order], "float32")):
            arrays.append(self._backend.zeros((max(len(values), 1),), dtype))
            if len(values):
                self._backend.from_host(values, arrays[-1])
        return SparseMatrix(arrays[0], arrays[1], arrays[2], shape)

    def forward(self, x: Array, y: Array) -> None:
        """y = M x."""
        self._backend.spatial_product(self._forward, x, y)

    def backward(self, dy: Array, dx: Array) -> None:
        """dx = M^T dy."""
        self._backend.spatial_product(self._backward, dy, dx)
