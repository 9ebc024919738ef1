"""The larger primitives as the interface makes them of elementary ones, here the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
from primitive_checks.batch_norm import *  # noqa: F403 -- the suite

from caffepy.backend import Backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.interface import NormalisationPrimitives


class Composed(CpuBackend):
    """A CPU without kernels of its own for these primitives."""

    batch_norm_measure = NormalisationPrimitives.batch_norm_measure
    batch_norm_forward = NormalisationPrimitives.batch_norm_forward
    batch_norm_backward_sums = NormalisationPrimitives.batch_norm_backward_sums
    batch_norm_backward_data = NormalisationPrimitives.batch_norm_backward_data
    relu_backward = NormalisationPrimitives.relu_backward
    activation_backward = NormalisationPrimitives.activation_backward


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Composed(2)


@pytest.fixture(scope="module", params=["float32"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def other_dtype(dtype: str) -> Any:
    return dtype
