"""Finding the newest snapshot that is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshot_runs import train

from caffepy.snapshot.files import newest_snapshot


def test_the_newest_whole_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    assert newest_snapshot("x") is None
    train(12, "snapshot: 4")
    assert newest_snapshot("x") == Path("x_iter_12.solverstate")
    os.utime("x_iter_4.solverstate", (2**32, 2**32))
    assert newest_snapshot("x") == Path("x_iter_4.solverstate"), "written last by another training"
    os.utime("x_iter_4.solverstate", (0, 0))
    Path("x_iter_12.solverstate").write_bytes(Path("x_iter_12.solverstate").read_bytes()[:-50])
    assert newest_snapshot(Path("x")) == Path("x_iter_8.solverstate")
    assert "skipping an incomplete snapshot: x_iter_12.solverstate" in caplog.text
    Path("x_iter_8.caffemodel").unlink()
    assert newest_snapshot("x") == Path("x_iter_4.solverstate")
    assert newest_snapshot("y") is None
