"""The base of layers that the host computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from caffepy.layers.layer import Blobs, Layer


class HostLayer(Layer):
    """A layer whose tops the host computes. The gradient of its bottoms, if it has one, is 0."""

    blocker: ClassVar[str]
    """Why the layer cannot be captured in a CUDA graph."""

    def compute(self, *values: Any) -> Sequence[Any]:
        """Return the tops' values, which set their shapes, from the bottoms'; NumPy arrays."""
        raise NotImplementedError

    def capture_blocker(self) -> str | None:
        return self.blocker

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values = [self.backend.to_host(blob.data) for blob in bottom]
        results: Sequence[Any] = [None] * len(top)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):
                results = [np.asarray(part, np.float32, order="C") for part in self.compute(*values)]
        for blob, result in zip(top, results, strict=False):
            if result is not None:
                blob.reshape(result.shape)
            self.backend.from_host(result, blob.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)
