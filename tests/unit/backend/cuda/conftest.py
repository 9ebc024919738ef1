"""Fixtures of tests that import CUDA's modules without a GPU."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock

import pytest


@pytest.fixture
def cupy_or_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let modules that import CuPy be imported where it is not installed."""
    try:
        importlib.import_module("cupy")
    except ImportError:
        monkeypatch.setitem(sys.modules, "cupy", MagicMock())
