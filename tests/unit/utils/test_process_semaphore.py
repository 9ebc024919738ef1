"""The semaphore of GPU tests (tests/support/process_semaphore.py)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from process_semaphore import semaphore


def test_so_many_are_in_their_blocks_at_once_and_leave_it_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with semaphore("oven", 2, 5.0), semaphore("sink", 1, 5.0), semaphore("oven", 2, 5.0):  # noqa: SIM117
        with pytest.raises(TimeoutError, match="others have oven for longer than 0 s"), semaphore("oven", 2, 0.1):
            pytest.fail("a third is in")
    with semaphore("oven", 2, 0.1), semaphore("oven", 2, 0.1):
        assert len(list(tmp_path.iterdir())) == 3
