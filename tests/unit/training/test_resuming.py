"""`--snapshot auto` with several devices: the root restores the newest snapshot that fits, the others take that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_graph_backend import NET
from training import solver_param

from caffepy.errors import SnapshotError
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_manager import P2PManager

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" random_seed: 3 snapshot_prefix: "x" snapshot: 2 '


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(iterations: int, rule: str = "SGD") -> None:
    param = solver_param(f'{SOLVER} max_iter: {iterations} type: "{rule}"', NET)
    P2PManager(TrainOptions(param, cpu_solvers=2, threads=1, timeout=300, resume_newest=True)).run()


def as_caffe_would_have_cut_it(path: Path) -> None:
    """Without the last blob of its history, and without what tells that one is missing."""
    state = SolverState.FromString(path.read_bytes())
    del state.history[-1]
    for field in ("blob_count", "crc32c"):
        state.ClearField(field)
    path.write_bytes(state.SerializeToString())


def test_all_devices_go_on_from_an_older_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(6)
    wanted = (folder / "x_iter_6.caffemodel").read_bytes()
    (folder / "x_iter_6.solverstate").unlink()
    as_caffe_would_have_cut_it(folder / "x_iter_4.solverstate")
    os.utime("x_iter_2.solverstate", (0, 0))
    run(6)
    assert "skipping a snapshot that cannot be restored: " in caplog.text
    assert "x_iter_4.solverstate: holds 3 history blobs, a SGD solver of this net has 4" in caplog.text
    assert (folder / "x_iter_6.caffemodel").read_bytes() == wanted


def test_a_snapshot_that_a_script_changed_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it is not the newest: the newest does not fit here, and the one before it is changed."""
    run(6)
    wanted = (folder / "x_iter_6.caffemodel").read_bytes()
    as_caffe_would_have_cut_it(folder / "x_iter_6.solverstate")
    changed = folder / "x_iter_4.solverstate"
    changed.write_bytes(SolverState.FromString(changed.read_bytes()).SerializeToString())
    for age, iteration in enumerate((6, 4, 2)):
        os.utime(f"x_iter_{iteration}.solverstate", (100 - age, 100 - age))
    run(6)
    assert "x_iter_4.solverstate: changed after caffepy wrote it" in caplog.text
    assert (folder / "x_iter_6.caffemodel").read_bytes() == wanted


def test_snapshots_of_another_solver_are_not_passed_over_to_start_anew(folder: Path) -> None:
    run(4)
    with pytest.raises(SnapshotError, match="x_iter_4.solverstate: is the state of a solver of type SGD.* move them "):
        run(6, "Adam")
