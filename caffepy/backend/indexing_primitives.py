"""Primitives that move elements by index: rows, sparse maps of pixels, the largest elements, regions of interest.

Owns the contract of what layers such as Embed, BatchReindex, Im2col, Interp, ArgMax and ROIPooling ask of a device; it
is part of `Backend`. Every sum is made in a fixed order: same input, same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from caffepy.backend.types import Array, Geometry


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in compressed sparse rows, in device memory.

    Args:
        begins: int32 (rows + 1,), where each row's entries begin in the other two.
        columns: int32 (entries,), each within [0, columns).
        weights: float32 (entries,).
        shape: (rows, columns).
    """

    begins: Array
    columns: Array
    weights: Array
    shape: tuple[int, int]


class IndexingPrimitives(ABC):
    """Arrays are dense and float32 unless said otherwise. The rows of an array are its parts along axis 0.

    `bad`: int32 (1,), set to the position in `index` (or `labels`, `mask`, `rois`) of an entry that names nothing, left
    alone (callers set -1) if there is none. Such entries give zeros and take part in no gradient.
    """

    @abstractmethod
    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        """destination[i] = source[index[i]], with `index` float32 (rows of destination,), rounded towards 0."""

    @abstractmethod
    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        """destination[index[i]] += source[i], in the order of i; the gradient of `gather_rows`."""

    @abstractmethod
    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        """out[i, labels[i]] = 1, all else 0; labels (size,), out (size, classes)."""

    @abstractmethod
    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        """y[n, c] = matrix @ x[n, c], the axes from the third on being one in logical order; in any dtype.

        x (N, C, ...) has as many elements a channel as the matrix has columns, y (N, C, ...) as it has rows.
        """

    @abstractmethod
    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        """The largest elements along `axis`, falling; the one of the larger index comes first where two are equal.

        indices and values have x's shape but along `axis`, where they have as many as are wanted.
        """

    @abstractmethod
    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        """y[n, c, mask] = x, all else 0, where mask (x's shape) is h * W + w in y's plane; of equals the last stays."""

    @abstractmethod
    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        """dx = dy[n, c, mask]."""

    @abstractmethod
    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = an element of each window of x, drawn in proportion to its value by `chance`, uniform in [0, 1).

        It is the first, row by row, at which the running sum reaches chance * the window's sum. mask, int32, becomes
        its h * W + w, as `pool_max_backward` takes it. Windows are clipped to the image and have no padding.
        """

    @abstractmethod
    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        """y (R, C, h, w) = the maximum of each bin of each region of x (N, C, H, W); 0 where a bin is empty.

        rois, float32 of R * 5 elements: sample, x1, y1, x2, y2 before `scale`. mask (int32, y's shape) becomes
        h * W + w, or -1. Bins: Fast R-CNN's `roi_pooling_layer.cpp`.
        """

    @abstractmethod
    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        """dx = the sum of dy over the bins whose maximum lies there, in the regions' order."""

    @abstractmethod
    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        """y (R, D, g, g) = the mean over each bin of each region, of the bin's own channel of x (N, D * g * g, H, W).

        Bin (h, w) of output d takes channel (d * g + h) * g + w (R-FCN's `psroi_pooling_layer.cu`).
        """

    @abstractmethod
    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        """dx = each dy / the bin's area, spread over its bin of its channel, added up in the regions' order."""
