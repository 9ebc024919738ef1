"""Finding the newest snapshot that is whole, and going on to older ones where it cannot be restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshot_runs import FORMATS, train

from caffepy.errors import SnapshotError
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.formats.snapshot_files import newest_snapshot, remove_snapshot, restore_first, snapshots


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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["solverstate", "caffemodel"])
def test_any_damage_leads_to_the_one_before(form: str, kind: str) -> None:
    """Every 512-byte block zeroed in turn: the newest snapshot is taken where nothing of it was lost."""
    train(4, f"{form} snapshot: 2")
    end = ".h5" if form else ""
    path, older = Path(f"x_iter_4.{kind}{end}"), Path(f"x_iter_2.solverstate{end}")
    os.utime(older, (0, 0))
    content = path.read_bytes()
    found = set()
    for start in range(0, len(content), 512):
        path.write_bytes(content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :])
        found.add(newest_snapshot("x"))
    assert older in found
    assert found <= ({older, Path(f"x_iter_4.solverstate{end}")} if form else {older})


def test_what_is_no_file_is_no_snapshot() -> None:
    os.mkfifo("x_iter_3.solverstate")
    Path("x_iter_4.solverstate").mkdir()
    Path("x_iter_5.solverstate").symlink_to("nowhere")
    Path("x_iter_6.solverstate").symlink_to("/dev/zero")
    Path(f"x_iter_{'7' * 60}.solverstate").write_bytes(b"")
    assert snapshots("x") == []
    assert newest_snapshot("x") is None


def test_weights_that_are_a_fifo_are_passed_over() -> None:
    state = SolverState(iter=3, learned_net="x_iter_3.caffemodel")
    Path("x_iter_3.solverstate").write_bytes(state.SerializeToString())
    os.mkfifo("x_iter_3.caffemodel")
    assert newest_snapshot("x") is None


def test_restoring_goes_on_to_older_ones(caplog: pytest.LogCaptureFixture) -> None:
    tried = []

    def restore(path: Path) -> None:
        tried.append(path.name)
        if path.name != "c":
            raise SnapshotError(f"{path} does not fit")

    assert restore_first([Path(name) for name in "abcd"], restore) == Path("c")
    assert tried == ["a", "b", "c"]
    assert "skipping a snapshot that cannot be restored: b does not fit" in caplog.text
    with pytest.raises(
        SnapshotError, match="a does not fit; older snapshots with this prefix cannot be restored either: move"
    ):
        restore_first([Path("a"), Path("b")], restore)


def test_both_halves_of_a_snapshot_are_removed(folder: Path) -> None:
    train(2)
    (folder / "x_iter_2.caffemodel.h5").write_bytes(b"of another one")
    remove_snapshot(Path("x_iter_2.solverstate"))
    assert [path.name for path in folder.iterdir()] == ["x_iter_2.caffemodel.h5"]
