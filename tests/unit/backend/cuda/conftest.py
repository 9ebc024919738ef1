"""Fixtures of tests that import CUDA's modules without a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest


@pytest.fixture(scope="module")
def cupy_or_mock() -> Iterator[None]:
    """Let modules that import CuPy be imported where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.import_module("cupy")
        except ImportError:
            patch.setitem(sys.modules, "cupy", MagicMock())
        yield
