"""Turns that GPU tests take (tests/support/turns.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from turns import turn


def test_so_many_have_their_turn_at_once_and_free_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = pytest.raises(TimeoutError, match="no turn at oven within 0 s")
    with turn("oven", 2, 5.0), turn("sink", 1, 5.0), turn("oven", 2, 5.0), refused, turn("oven", 2, 0.1):
        pytest.fail("a third has its turn")
    with turn("oven", 2, 0.1), turn("oven", 2, 0.1):
        assert len(list(tmp_path.iterdir())) == 3
