"""Resuming: the same bytes as never stopping, and what is refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER, train
from training import PLAIN, TINY, build_solver

from caffepy.data.sharding import Shard
from caffepy.errors import SnapshotError
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.formats.solverstate import read_solverstate


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
@pytest.mark.parametrize("form", FORMATS)
def test_stopping_and_resuming_gives_the_same_bytes_as_never_stopping(folder: Path, rule: str, form: str) -> None:
    text = f'{form} type: "{rule}" snapshot: 2 display: 1'
    end = ".h5" if form else ""
    (folder / "straight").mkdir()
    os.chdir(folder / "straight")
    straight = train(6, text)
    os.chdir(folder)
    train(4, text)
    resumed = train(6, text, f"x_iter_4.solverstate{end}")
    for name, values in straight.items():
        np.testing.assert_array_equal(resumed[name], values)
    for kind in ("caffemodel", "solverstate"):
        name = f"x_iter_6.{kind}{end}"
        assert (folder / name).read_bytes() == (folder / "straight" / name).read_bytes(), kind


def test_the_loss_shown_is_the_same_after_resuming(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(6, "display: 1 snapshot: 4")
    first = [m for m in caplog.messages if m.startswith(("Iteration 5 (", "Iteration 6, loss"))]
    caplog.clear()
    train(6, "display: 1", "x_iter_4.solverstate")
    second = [m for m in caplog.messages if m.startswith(("Iteration 5 (", "Iteration 6, loss"))]
    assert [m.split("loss")[1] for m in first] == [m.split("loss")[1] for m in second]
    assert len(first) == 2


def test_a_state_without_weights_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(2)
    state = SolverState.FromString((folder / "x_iter_2.solverstate").read_bytes())
    for name in ("learned_net", "blob_count", "crc32c"):
        state.ClearField(name)
    (folder / "old.solverstate").write_bytes(state.SerializeToString())
    train(3, resume="old.solverstate")
    assert "old.solverstate names no learned_net: the weights stay as they are, as in Caffe" in caplog.messages


def test_weights_are_also_found_beside_the_state(folder: Path) -> None:
    train(2)
    (folder / "moved").mkdir()
    for kind in ("caffemodel", "solverstate"):
        (folder / f"x_iter_2.{kind}").rename(folder / "moved" / f"x_iter_2.{kind}")
    train(4, resume="moved/x_iter_2.solverstate")
    (folder / "moved" / "x_iter_2.caffemodel").unlink()
    with pytest.raises(SnapshotError, match="its weights x_iter_2.caffemodel do not exist, nor does moved/x_iter_2"):
        train(4, resume="moved/x_iter_2.solverstate")


def test_another_seed_goes_on_with_the_snapshots() -> None:
    straight = train(4)
    train(2)
    resumed = train(4, "random_seed: 77", "x_iter_2.solverstate")
    for name, values in straight.items():
        np.testing.assert_array_equal(resumed[name], values)


class Positioned:
    """Gives a layer a place in its data."""

    def __init__(self, layer: Any) -> None:
        self.at, self.sought = 40, -1
        layer.position = lambda: self.at
        layer.seek = lambda position: setattr(self, "sought", position)


def test_data_layers_positions_are_kept() -> None:
    with build_solver(SOLVER + "max_iter: 2", NET) as solver:
        Positioned(solver.net.layers[0]).at = 123
        Positioned(solver.test_nets[0].layers[0]).at = 40
        solver.step(1)
        solver.snapshot()
    with build_solver(SOLVER + "max_iter: 2", NET) as solver:
        train_place, test_place = Positioned(solver.net.layers[0]), Positioned(solver.test_nets[0].layers[0])
        solver.restore(Path("x_iter_1.solverstate"))
        assert (train_place.sought, test_place.sought) == (123, 40)


def test_layers_without_records_have_no_position_in_a_snapshot(tmp_path: Path) -> None:
    with build_solver(PLAIN + f'snapshot_prefix: "{tmp_path}/x"', TINY) as solver:
        assert not read_solverstate(solver.snapshot()).message.data_position


def test_caffes_own_state_starts_the_data_anew() -> None:
    with build_solver(SOLVER + "iter_size: 3", NET) as solver:
        solver.step(1)
        path = solver.snapshot()
        state = SolverState.FromString(path.read_bytes())
        caffes = SolverState(iter=5, learned_net=state.learned_net, history=state.history, current_step=1)
        path.write_bytes(caffes.SerializeToString())
        place = Positioned(solver.net.layers[0])
        solver.restore(path)
        assert place.sought == 0
        assert solver.iteration == 5
        assert solver.net.context.passes.number == 15


def test_another_global_batch_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    train(2)
    with build_solver(SOLVER, NET, shard=Shard(rank=0, world_size=3)) as solver:
        solver.restore(Path("x_iter_2.solverstate"))
    assert "made with 4 samples an iteration and pass, now there are 12" in caplog.text


OTHER_SHAPE = NET.replace("num_output: 2 kernel_size: 3", "num_output: 3 kernel_size: 3")
RENAMED = NET.replace('name: "conv"', 'name: "convolution"')


@pytest.mark.parametrize(
    ("text", "net", "message"),
    [
        ('type: "Adam"', NET, "x_iter_2.solverstate: is the state of a solver of type SGD, this one is Adam"),
        ("", OTHER_SHAPE, r"the history of parameter 0 of layer 'conv' has shape 2 3 3 3 \(54\), .* 3 3 3 3 \(81\)"),
        ("", RENAMED, "x_iter_2.caffemodel: has no layer 'convolution'"),
        (
            "",
            NET.replace("inner_product_param {", "inner_product_param { bias_term: false"),
            "holds 7 history blobs, a SGD solver of this net has 6",
        ),
    ],
)
def test_a_state_of_another_solver_or_net_is_refused(text: str, net: str, message: str) -> None:
    train(2)
    with pytest.raises(SnapshotError, match=message):
        train(4, text, "x_iter_2.solverstate", net)


def test_caffes_state_of_another_rule_is_refused_by_its_history() -> None:
    train(2)
    state = SolverState.FromString(Path("x_iter_2.solverstate").read_bytes())
    for field in ("solver_type", "blob_count", "crc32c"):
        state.ClearField(field)
    Path("x_iter_2.solverstate").write_bytes(state.SerializeToString())
    with pytest.raises(SnapshotError, match="holds 7 history blobs, a Adam solver of this net has 14"):
        train(4, 'type: "Adam"', "x_iter_2.solverstate")


@pytest.mark.parametrize("form", FORMATS)
def test_weights_in_place_of_a_state_are_refused(form: str) -> None:
    train(2, form)
    with pytest.raises(
        SnapshotError, match="it is a .caffemodel; load it with --weights|is not a .solverstate.h5 but a"
    ):
        train(4, form, "x_iter_2.caffemodel" + (".h5" if form else ""))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["solverstate", "caffemodel"])
def test_truncated_files_are_refused(form: str, kind: str) -> None:
    train(2, form)
    end = ".h5" if form else ""
    path = Path(f"x_iter_2.{kind}{end}")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SnapshotError, match=f"x_iter_2.{kind}{end}.*: .*truncated"):
        train(4, form, f"x_iter_2.solverstate{end}")


def test_missing_files_are_refused() -> None:
    with pytest.raises(SnapshotError, match="nothing.solverstate"):
        train(4, resume="nothing.solverstate")
