"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import default_interrupts


@pytest.fixture(autouse=True, scope="session")
def _interrupts() -> Iterator[None]:
    with default_interrupts():
        yield
