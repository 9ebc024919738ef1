"""The primitives of the CUDA backend, in each dtype of blobs."""

from __future__ import annotations

from typing import Any

import pytest
from primitive_checks import *  # noqa: F403 -- the suite

from caffepy.backend.types import DTYPES


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=DTYPES)
def other_dtype(request: pytest.FixtureRequest) -> Any:
    return request.param
