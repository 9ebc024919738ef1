"""Tests in this folder need an NVIDIA GPU with CuPy and cuDNN; without them all are skipped, for one stated reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from caffepy.backend import Backend, create_backend
from caffepy.errors import UserError

HERE = Path(__file__).parent


def _why_not() -> str:
    """Why GPU tests cannot run here; empty if they can."""
    try:
        create_backend(0).close()
    except UserError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """GPU 0, active in this thread."""
    made = create_backend(0)
    with made.activate():
        yield made
    made.close()
