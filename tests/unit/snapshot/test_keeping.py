"""Which snapshots stay with --keep-last and --keep-best, and what is never removed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER, train
from training import build_solver

from caffepy.errors import ConfigError
from caffepy.snapshot.files import read_state
from caffepy.solvers import Solver
from caffepy.solvers.execution_options import Keep

SCORED = NET + (
    'layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }'
)


def left(folder: Path) -> list[int]:
    """The iterations of whole snapshots, after a check that none has one half alone."""
    halves = {kind: {int(p.name.split("_")[2].split(".")[0]) for p in folder.glob(f"x_iter_*.{kind}*")}
              for kind in ("solverstate", "caffemodel")}  # fmt: skip
    assert halves["solverstate"] == halves["caffemodel"]
    return sorted(halves["solverstate"])


@pytest.mark.parametrize("form", FORMATS)
def test_the_last_ones_stay(folder: Path, form: str) -> None:
    train(10, f"{form} snapshot: 2", keep=Keep(last=2))
    assert left(folder) == [8, 10]
    assert len(list(folder.iterdir())) == 4


def test_all_stay_where_nothing_is_said(folder: Path) -> None:
    train(6, "snapshot: 2")
    assert left(folder) == [2, 4, 6]


def test_files_of_others_stay(folder: Path) -> None:
    others = [
        "x_iter_2.caffemodel.bak", "xx_iter_2.solverstate", "x_iter_.solverstate", "x_iter_a.solverstate",
        "x_iter_2.prototxt", "y_iter_2.solverstate", "x_iter_7.caffemodel", "x_iter_2.solverstate.h5x",
    ]  # fmt: skip
    for name in others:
        (folder / name).write_bytes(b"")
    (folder / "precious").write_bytes(b"")
    (folder / "x_iter_1.solverstate").symlink_to("precious")
    (folder / "x_iter_3.solverstate").write_bytes(b"")
    (folder / "x_iter_3.caffemodel").symlink_to("precious")
    (folder / "x_iter_5.solverstate").mkdir()
    train(8, "snapshot: 2", keep=Keep(last=1))
    stay = {*others, "precious", "x_iter_1.solverstate", "x_iter_3.solverstate", "x_iter_3.caffemodel",
            "x_iter_5.solverstate"}  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {*stay, "x_iter_8.solverstate", "x_iter_8.caffemodel"}


def test_a_state_removes_no_file_that_it_names(folder: Path) -> None:
    train(2)
    state = read_state(folder / "x_iter_2.solverstate")
    (folder / "precious").write_bytes((folder / "x_iter_2.caffemodel").read_bytes())
    state.learned_net = str(folder / "precious")
    for field in ("blob_count", "crc32c"):
        state.ClearField(field)
    (folder / "x_iter_2.solverstate").write_bytes(state.SerializeToString())
    train(4, "snapshot: 4", resume="x_iter_2.solverstate", keep=Keep(last=1))
    assert left(folder) == [4]
    assert (folder / "precious").exists()


def test_an_older_trainings_snapshots_go_first_though_it_came_further(folder: Path) -> None:
    train(8, "snapshot: 4")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    train(4, "snapshot: 2", keep=Keep(last=2))
    assert left(folder) == [2, 4]


def test_older_ones_stay_when_the_newest_cannot_be_read_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(4, "snapshot: 2")
    with build_solver(SOLVER, NET, keep=Keep(last=1)) as solver:
        solver.restore(Path("x_iter_4.solverstate"))
        solver.step(1)
        monkeypatch.setattr("caffepy.solvers.io.state.write_weights", lambda path, *_: path.write_bytes(b"no weights"))
        solver.snapshot()
    assert left(folder) == [2, 4, 5]
    assert "older snapshots are kept, because the newest cannot be read back: x_iter_5.caffemodel" in caplog.text


def test_devices_that_are_not_the_root_remove_nothing(folder: Path) -> None:
    train(4, "snapshot: 2")
    with build_solver(SOLVER, NET, keep=Keep(last=1)) as solver:
        solver.restore(Path("x_iter_4.solverstate"))
        solver.callback.is_root = False
        solver._keeper.wrote(Path("x_iter_4.solverstate"))
    assert left(folder) == [2, 4]


def test_a_snapshot_that_cannot_be_removed_does_not_end_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("caffepy.solvers.io.keeping.remove_snapshot", refuse)
    train(4, "snapshot: 2", keep=Keep(last=1))
    assert left(folder) == [2, 4]
    assert "x_iter_2.solverstate: cannot be removed: Operation not permitted" in caplog.text


def scored(monkeypatch: pytest.MonkeyPatch, name: str, values: dict[int, float]) -> None:
    """Let tests find these scores, by iteration."""
    import caffepy.solvers.io.testing as testing

    def run_test(state: Any, index: int, interrupted: Any) -> dict[str, np.ndarray]:
        return {name: np.array(values.get(state.iteration, 0.5), np.float64)}

    monkeypatch.setattr(testing, "run_test", run_test)


@pytest.mark.parametrize(
    ("name", "score", "last", "stay"),
    [
        ("accuracy", "accuracy", 0, [4, 10]),
        ("accuracy", "accuracy", 2, [4, 8, 10]),
        ("loss", "loss", 1, [6, 10]),
    ],
)
def test_the_best_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, score: str, last: int, stay: list[int]
) -> None:
    scored(monkeypatch, name, {2: 0.6, 4: 0.9, 6: 0.1, 8: 0.9, 10: float("nan")})
    with build_solver(SOLVER + "max_iter: 10 snapshot: 2", SCORED, keep=Keep(last, score)) as solver:
        solver.solve()
    assert left(folder) == stay


def test_the_best_of_before_is_known_after_resuming(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, "accuracy", {2: 0.9, 4: 0.1, 6: 0.2, 8: 0.3})
    keep = Keep(last=2, best="accuracy")
    for end, resume in ((4, ""), (8, "x_iter_4.solverstate")):
        with build_solver(SOLVER + f"max_iter: {end} snapshot: 2", SCORED, keep=keep) as solver:
            solver.solve(Path(resume) if resume else None)
    assert left(folder) == [2, 6, 8]
    scores = read_state(folder / "x_iter_8.solverstate").snapshot_score
    assert {score.name for score in scores} == {"accuracy"}
    assert {score.iter: score.value for score in scores} == {2: 0.9, 4: 0.1, 6: 0.2}


def test_a_best_that_falls_back_is_removed_after_its_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, "accuracy", {2: 0.5, 4: 0.9})
    with build_solver(SOLVER + "max_iter: 4 snapshot: 2", SCORED, keep=Keep(best="accuracy")) as solver:
        solver.solve()
    assert left(folder) == [4]


def test_the_loss_is_the_sum_of_the_weighted_ones(caplog: pytest.LogCaptureFixture) -> None:
    net = SCORED.replace('top: "loss" }', 'top: "error" loss_weight: 2 }')
    with build_solver(SOLVER, net, keep=Keep(best="loss")) as solver, caplog.at_level(logging.INFO):
        solver._snapshot_at = 0
        scores = solver.test_all()
        assert solver.state.scores == {0: pytest.approx(2 * float(scores[0]["error"]))}


def build(text: str, best: str) -> Solver:
    with build_solver(text, SCORED, keep=Keep(best=best)) as solver:
        return solver


def test_a_score_that_no_test_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--keep-best acuracy: no test net has such an output; did you mean 'accurac"):
        build(SOLVER, "acuracy")
    with pytest.raises(ConfigError, match="--keep-best accuracy needs tests: set test_iter and test_interval"):
        build(SOLVER.replace("test_interval: 2 test_iter: 2", ""), "accuracy")


def test_what_a_killed_run_has_left_is_removed_at_the_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("x_iter_2.caffemodel", "x_iter_12.solverstate.h5", "xy_iter_2.caffemodel", "trace.json"):
        path = folder / f".{name}.{'0' * 16}.tmp"
        path.write_bytes(b"a part")
        os.utime(path, (0, 0))
    with caplog.at_level(logging.INFO), build_solver(SOLVER, NET):
        assert sorted(p.name.split(".0")[0] for p in folder.iterdir()) == [".trace.json", ".xy_iter_2.caffemodel"]
    assert "removed .x_iter_2.caffemodel." in caplog.text and "which a process that was killed has left" in caplog.text
