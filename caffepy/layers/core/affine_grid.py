"""The pixels of an image that an affine transformation makes (SpatialTransformer, STLoss)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def output_grid(height: int, width: int) -> NDArray[np.float32]:
    """Return the coordinates (3, height * width) of the top's pixels: row and column in [-1, 1), and 1."""
    rows, columns = np.meshgrid(np.arange(height) / height, np.arange(width) / width, indexing="ij")
    return np.stack([2 * rows.ravel() - 1, 2 * columns.ravel() - 1, np.ones(rows.size)]).astype(np.float32)
