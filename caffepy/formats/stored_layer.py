"""What writers of snapshots need of a net's layer and of its parameters. Layers and blobs have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from caffepy.formats.proto import caffe_pb2


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
