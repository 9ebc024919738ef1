"""The shapes that blobs may have, how Caffe's log prints them, and what writers of snapshots need of layers and blobs.

Layers and blobs have the members of `StoredLayer` and `StoredBlob`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from caffepy.errors import BlobSizeError, ShapeError
from caffepy.formats.proto import caffe_pb2

if TYPE_CHECKING:
    pass


MAX_AXES = 32
"""Caffe's limit on the axes of one blob (`blob.hpp`, kMaxBlobAxes)."""
MAX_ELEMENTS = 2**31 - 1
"""Caffe's limit on the elements of one blob."""


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Refuse shapes that no blob may have, before anything is allocated.

    Raises:
        ShapeError: a negative dimension, or more than 32 of them.
        BlobSizeError: over 2^31 - 1 elements.
    """
    if len(shape) > MAX_AXES:
        raise ShapeError(f"{where}: a shape of {len(shape)} axes is not possible: a blob has at most {MAX_AXES} axes")
    negative = any(d < 0 for d in shape)
    if negative or math.prod(shape) > MAX_ELEMENTS:
        kind = ShapeError if negative else BlobSizeError
        raise kind(
            f"{where}: shape {format_shape(shape)} is not possible: a blob has at most {MAX_AXES} axes, none "
            f"negative, and at most {MAX_ELEMENTS} elements"
        )


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape as Caffe's log prints it: ``64 1 28 28 (50176)``."""
    return f"{' '.join(map(str, shape))} ({math.prod(shape)})".lstrip()


class StoredBlob(Protocol):
    """A parameter: its values and gradients in host memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def gradient_owner(self) -> Any:
        """The parameter whose gradients it shares, or itself."""

    def host_data(self) -> np.ndarray:
        """Return the values."""

    def host_diff(self) -> np.ndarray:
        """Return the gradients."""


class StoredLayer(Protocol):
    """A layer: its settings and parameters."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def type(self) -> str:
        """Its type."""

    @property
    def param(self) -> caffe_pb2.LayerParameter:
        """Its settings, without parameters."""

    @property
    def loss_weights(self) -> Sequence[float]:
        """One for each top."""

    @property
    def blobs(self) -> Sequence[StoredBlob]:
        """Its parameters."""
