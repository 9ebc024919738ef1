"""Convolution on the CPU over any number of spatial axes, by NumPy: simple and slow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.types import Geometry, spatial_output


class GeneralConvolution:
    """A convolution of any number of spatial axes, simple and slow.

    Args:
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: how the windows move.
    """

    gives_sums = False

    def __init__(self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> None:
        self._x_shape = x_shape
        self._weights_shape = weights_shape
        self._geometry = geometry
        g = geometry
        self._out = tuple(map(spatial_output, x_shape[2:], g.kernel, g.stride, g.pad, g.dilation))

    def _padded(self) -> Any:
        spatial = [d + 2 * p for d, p in zip(self._x_shape[2:], self._geometry.pad, strict=True)]
        return np.zeros((self._x_shape[0], *spatial, self._x_shape[1]), np.float32)

    def _inside(self, padded: Any) -> Any:
        spatial = [slice(p, p + d) for d, p in zip(self._x_shape[2:], self._geometry.pad, strict=True)]
        return padded[(slice(None),) + tuple(spatial)]

    def _windows(self, padded: Any) -> list[Any]:
        """For each kernel element, the view (N, out..., C) of the elements that meet it."""
        g = self._geometry
        views = []
        for element in np.ndindex(*g.kernel):
            index = [
                slice(k * d, k * d + (o - 1) * s + 1, s)
                for k, d, o, s in zip(element, g.dilation, self._out, g.stride, strict=True)
            ]
            views.append(padded[(slice(None),) + tuple(index)])
        return views

    def _columns(self, x: Any) -> list[Any]:
        """For each group, (N * out..., kernel..., C / group) as a matrix."""
        padded = self._padded()
        self._inside(padded)[...] = np.moveaxis(x, 1, -1)
        columns = np.stack(self._windows(padded), axis=-2)
        size = self._weights_shape[1]
        rows = math.prod(columns.shape[:-2])
        return [columns[..., i * size : (i + 1) * size].reshape(rows, -1) for i in range(self._geometry.group)]

    def _matrices(self, weights: Any) -> list[Any]:
        """For each group, (num_output / group, kernel..., C / group) as a matrix."""
        size = self._weights_shape[0] // self._geometry.group
        matrix = np.moveaxis(weights, 1, -1)
        return [matrix[i * size : (i + 1) * size].reshape(size, -1) for i in range(self._geometry.group)]

    def _groups_of(self, y: Any) -> list[Any]:
        rows = np.moveaxis(y, 1, -1).reshape(-1, self._weights_shape[0])
        return np.split(rows, self._geometry.group, axis=1)

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        assert sums is None, "gives no sums"
        parts = [c @ w.T for c, w in zip(self._columns(x), self._matrices(weights), strict=True)]
        result = np.concatenate(parts, axis=1)
        if bias is not None:
            result += bias
        if relu:
            np.maximum(result, 0, out=result)
        np.moveaxis(y, 1, -1)[...] = result.reshape(self._x_shape[0], *self._out, -1)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        kernel, size = math.prod(self._geometry.kernel), self._weights_shape[1]
        shape = (self._x_shape[0], *self._out, kernel, size)
        parts = [(d @ w).reshape(shape) for d, w in zip(self._groups_of(dy), self._matrices(weights), strict=True)]
        columns = np.concatenate(parts, axis=-1)
        padded = self._padded()
        for element, view in enumerate(self._windows(padded)):
            view += columns[..., element, :]
        np.moveaxis(dx, 1, -1)[...] = self._inside(padded)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        parts = [d.T @ c for d, c in zip(self._groups_of(dy), self._columns(x), strict=True)]
        shape = (self._weights_shape[0], *self._geometry.kernel, self._weights_shape[1])
        result = np.concatenate(parts, axis=0).reshape(shape)
        target = np.moveaxis(dweights, 1, -1)
        if accumulate:
            target += result
        else:
            target[...] = result
