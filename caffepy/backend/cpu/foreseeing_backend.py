"""A CPU backend on which a net is run for the kernels that it will call; none of them is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.copying import is_images
from caffepy.backend.types import Array


class ForeseeingBackend(CpuBackend):
    """A backend whose arrays are never written, so that they take no memory: the system gives it when it is touched.

    Args:
        threads: as `CpuBackend` takes it; which kernels are called can depend on it.
    """

    holds_values = False
    records = False
    asynchronous = True  # errors of kernels, which nobody ran, are not asked for

    def fill(self, array: Array, value: float) -> None:
        """Fills nothing."""

    def copy(self, source: Array, destination: Array) -> None:
        """Copies nothing; kernels that would are noted."""
        if is_images(source, destination):
            super().copy(source, destination)

    def to_host(self, array: Array) -> Any:
        return np.zeros(array.shape, array.dtype)
