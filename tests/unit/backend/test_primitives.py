"""The primitives of the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
from primitive_checks import *  # noqa: F403 -- the suite

from caffepy.backend import Backend, create_backend


@pytest.fixture(scope="module")
def backend() -> Backend:
    return create_backend(threads=2)


@pytest.fixture(scope="module", params=["float32"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def other_dtype(dtype: str) -> Any:
    return dtype
