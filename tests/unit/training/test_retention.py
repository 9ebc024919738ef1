"""Which snapshots stay with --keep-last and --keep-best, what is never removed, and what is not replaced."""

from __future__ import annotations

import logging
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER, train
from training import build_solver

from caffepy.errors import ConfigError
from caffepy.formats.binary import blob_shape
from caffepy.formats.caffemodel import read_layer_shapes
from caffepy.formats.messages import field_header
from caffepy.formats.proto.caffe_pb2 import BlobProto, BlobShape, LayerParameter, NetParameter
from caffepy.formats.solverstate import read_solverstate
from caffepy.training.callback import SingleDevice
from caffepy.training.evaluate import Evaluator
from caffepy.training.solver import Solver
from caffepy.utils.options import RetentionPolicy

SCORED = NET + (
    'layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(folder: Path) -> list[int]:
    """The iterations of whole snapshots, after a check that none has one half alone."""
    halves = {
        kind: {int(p.name.split("_")[2].split(".")[0]) for p in folder.glob(f"x_iter_*.{kind}*")}
        for kind in ("solverstate", "caffemodel")
    }
    assert halves["solverstate"] == halves["caffemodel"]
    return sorted(halves["solverstate"])


@pytest.mark.parametrize("form", FORMATS)
def test_the_last_ones_stay(folder: Path, form: str) -> None:
    train(10, f"{form} snapshot: 2", keep=RetentionPolicy(keep_last=2))
    assert left(folder) == [8, 10]
    assert len(list(folder.iterdir())) == 4


def test_all_stay_where_nothing_is_said(folder: Path) -> None:
    train(6, "snapshot: 2")
    assert left(folder) == [2, 4, 6]


def test_files_of_others_stay(folder: Path) -> None:
    others = [
        "x_iter_2.caffemodel.bak",
        "xx_iter_2.solverstate",
        "x_iter_.solverstate",
        "x_iter_a.solverstate",
        "x_iter_2.prototxt",
        "y_iter_2.solverstate",
        "x_iter_7.caffemodel",
        "x_iter_2.solverstate.h5x",
    ]
    for name in others:
        (folder / name).write_bytes(b"")
    (folder / "precious").write_bytes(b"")
    (folder / "x_iter_1.solverstate").symlink_to("precious")
    (folder / "x_iter_3.solverstate").write_bytes(b"")
    (folder / "x_iter_3.caffemodel").symlink_to("precious")
    (folder / "x_iter_5.solverstate").mkdir()
    train(8, "snapshot: 2", keep=RetentionPolicy(keep_last=1))
    stay = {
        *others,
        "precious",
        "x_iter_1.solverstate",
        "x_iter_3.solverstate",
        "x_iter_3.caffemodel",
        "x_iter_5.solverstate",
    }
    assert {path.name for path in folder.iterdir()} == {*stay, "x_iter_8.solverstate", "x_iter_8.caffemodel"}


def test_a_state_removes_no_file_that_it_names(folder: Path) -> None:
    train(2)
    state = read_solverstate(folder / "x_iter_2.solverstate").message
    (folder / "precious").write_bytes((folder / "x_iter_2.caffemodel").read_bytes())
    state.learned_net = str(folder / "precious")
    for field in ("blob_count", "crc32c"):
        state.ClearField(field)
    (folder / "x_iter_2.solverstate").write_bytes(state.SerializeToString())
    train(4, "snapshot: 4", resume="x_iter_2.solverstate", keep=RetentionPolicy(keep_last=1))
    assert left(folder) == [4]
    assert (folder / "precious").exists()


def test_an_older_trainings_snapshots_go_first_though_it_came_further(folder: Path) -> None:
    train(8, "snapshot: 4")
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    train(4, "snapshot: 2", keep=RetentionPolicy(keep_last=2))
    assert left(folder) == [2, 4]


def test_older_ones_stay_when_the_newest_cannot_be_read_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(4, "snapshot: 2")
    with build_solver(SOLVER, NET, keep=RetentionPolicy(keep_last=1)) as solver:
        solver.restore(Path("x_iter_4.solverstate"))
        solver.step(1)
        broken = lambda path, *_: path.write_bytes(b"no weights")  # noqa: E731
        monkeypatch.setattr("caffepy.training.snapshot.write_caffemodel", broken)
        solver.snapshot()
    assert left(folder) == [2, 4, 5]
    assert "older snapshots are kept, because the newest cannot be read back: x_iter_5.caffemodel" in caplog.text


def test_devices_that_are_not_the_root_remove_nothing(folder: Path) -> None:
    train(4, "snapshot: 2")
    other = SingleDevice()
    other.is_root = False
    with build_solver(SOLVER, NET, keep=RetentionPolicy(keep_last=1), callback=other) as solver:
        solver.restore(Path("x_iter_4.solverstate"))
        solver.snapshots.retention.wrote(Path("x_iter_4.solverstate"))
    assert left(folder) == [2, 4]


def test_a_snapshot_that_cannot_be_removed_does_not_end_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("caffepy.training.retention.remove_snapshot", refuse)
    train(4, "snapshot: 2", keep=RetentionPolicy(keep_last=1))
    assert left(folder) == [2, 4]
    assert "x_iter_2.solverstate: cannot be removed: Operation not permitted" in caplog.text


def scored(monkeypatch: pytest.MonkeyPatch, name: str, values: dict[int, float]) -> None:
    """Let tests find these scores, by iteration."""

    def run_all(evaluator: Evaluator, runners: Any, iteration: int) -> list[dict[str, np.ndarray]]:
        return [{name: np.array(values.get(iteration, 0.5), np.float64)}]

    monkeypatch.setattr(Evaluator, "run_all", run_all)


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
    with build_solver(SOLVER + "max_iter: 10 snapshot: 2", SCORED, keep=RetentionPolicy(last, score)) as solver:
        solver.solve()
    assert left(folder) == stay


def test_the_best_of_before_is_known_after_resuming(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, "accuracy", {2: 0.9, 4: 0.1, 6: 0.2, 8: 0.3})
    keep = RetentionPolicy(keep_last=2, keep_best="accuracy")
    for end, resume in ((4, ""), (8, "x_iter_4.solverstate")):
        with build_solver(SOLVER + f"max_iter: {end} snapshot: 2", SCORED, keep=keep) as solver:
            solver.solve(Path(resume) if resume else None)
    assert left(folder) == [2, 6, 8]
    scores = read_solverstate(folder / "x_iter_8.solverstate").message.snapshot_score
    assert {score.name for score in scores} == {"accuracy"}
    assert {score.iter: score.value for score in scores} == {2: 0.9, 4: 0.1, 6: 0.2}


def test_a_best_that_falls_back_is_removed_after_its_test(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(monkeypatch, "accuracy", {2: 0.5, 4: 0.9})
    with build_solver(SOLVER + "max_iter: 4 snapshot: 2", SCORED, keep=RetentionPolicy(keep_best="accuracy")) as solver:
        solver.solve()
    assert left(folder) == [4]


def test_the_loss_is_the_sum_of_the_weighted_ones(caplog: pytest.LogCaptureFixture) -> None:
    net = SCORED.replace('top: "loss" }', 'top: "error" loss_weight: 2 }')
    with build_solver(SOLVER, net, keep=RetentionPolicy(keep_best="loss")) as solver, caplog.at_level(logging.INFO):
        solver.snapshots.iteration = 0
        scores = solver.test_all()
        assert solver.snapshots.retention.scores == {0: pytest.approx(2 * float(scores[0]["error"]))}


def build(text: str, best: str) -> Solver:
    with build_solver(text, SCORED, keep=RetentionPolicy(keep_best=best)) as solver:
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
    assert "removed .x_iter_2.caffemodel." in caplog.text and "a temporary file of a killed process" in caplog.text


# -- snapshots of an earlier training ------------------------------------------------------------------

WIDER = NET.replace("num_output: 2 weight_filler", "num_output: 3 weight_filler")
RENAMED = NET.replace("group/ip", "group/other")
SHARED = NET.replace(
    'layer { name: "loss"',
    'layer { name: "again" type: "InnerProduct" bottom: "conv" top: "again" param { name: "w" } param { name: "b" }\n'
    "  inner_product_param { num_output: 2 } }\n"
    'layer { name: "silent" type: "Silence" bottom: "again" }\nlayer { name: "loss"',
).replace('bottom: "conv" top: "ip"', 'bottom: "conv" top: "ip" param { name: "w" } param { name: "b" }')
UNLIKE = {
    WIDER: r"parameter 0 of the layer 'group/ip' has shape 2 18 \(36\) there and 3 18 \(54\) in the net",
    RENAMED: "the layer 'group/other' is not in it",
    NET.replace("weight_filler", "bias_term: false weight_filler"): "the layer 'conv' has 2 parameters there and 1 in",
    NET.replace(
        'layer { name: "norm"', 'layer { name: "extra" type: "PReLU" bottom: "conv" top: "conv" }\nlayer { name: "norm"'
    ): "the layer 'extra' is not in it",
    SHARED: "the layer 'again' in it is not in the net",
}


def check(text: str, net: str = NET, resume: str = "", **keywords: Any) -> None:
    """Look at earlier snapshots as a training does before its first iteration."""
    with build_solver(SOLVER + text, net, **keywords) as solver:
        if resume:
            solver.restore(Path(resume))
        solver.snapshots.check_earlier()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("net", UNLIKE, ids=range(len(UNLIKE)))
def test_a_file_of_another_net_is_not_replaced(folder: Path, form: str, net: str) -> None:
    """Nor is it looked at where the training writes no such file."""
    written, own = (SHARED, NET) if net is SHARED else (NET, net)
    train(4, form + "snapshot: 2", net=written)
    if not (net is SHARED and form):  # HDF5 holds a shared parameter once
        file = r"x_iter_2\.caffemodel(\.h5)?|x_iter_4\.caffemodel(\.h5)?"
        with pytest.raises(ConfigError, match=rf"({file}) is of another net \({UNLIKE[net]}.*replaced.*--overwrite"):
            check(form + "max_iter: 9 snapshot: 2", own)
        with pytest.raises(ConfigError, match=r"x_iter_4\.caffemodel.* is of another net .* would be replaced"):
            check(form + "max_iter: 4 snapshot: 3", own)
        with pytest.raises(ConfigError, match=r"caffemodel.* is of another net .* would be removed"):
            check(form + "max_iter: 9 snapshot: 3", own, keep=RetentionPolicy(keep_last=1))
    check(form + "max_iter: 9 snapshot: 3", own)
    check(form + "max_iter: 4 snapshot: 0 snapshot_after_train: false", own)
    other = next(other for other in FORMATS if other != form)
    check(other + "max_iter: 4 snapshot: 2", own)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("net", [NET, SHARED], ids=["plain", "shared"])
def test_files_of_the_same_net_are_replaced_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, form: str, net: str
) -> None:
    check(form + "max_iter: 4 snapshot: 2", net)
    assert "snapshots" not in caplog.text
    train(4, form + "snapshot: 2", net=net)
    for path in folder.glob("x_iter_2.*"):
        os.utime(path, (0, 0))
    check(form + "max_iter: 4 snapshot: 2", net, keep=RetentionPolicy(keep_last=1))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert warning.startswith("x_iter_4.solverstate") and "--snapshot auto" in warning


@pytest.mark.parametrize("prefix", ["x", "./x", "{folder}/x"])
def test_a_run_that_goes_on_gives_no_warning(folder: Path, caplog: pytest.LogCaptureFixture, prefix: str) -> None:
    train(4, "snapshot: 2")
    caplog.clear()
    check("max_iter: 8 snapshot: 2", resume=prefix.format(folder=folder) + "_iter_2.solverstate")
    assert caplog.records == []
    (folder / "elsewhere").mkdir()
    for path in folder.glob("x_iter_2.*"):
        (folder / "elsewhere" / path.name).write_bytes(path.read_bytes())
    check("max_iter: 8 snapshot: 2", resume="elsewhere/x_iter_2.solverstate")
    assert "x_iter_4.solverstate is the newest of the snapshots" in caplog.text


def test_older_files_of_another_net_stay_behind_a_run_that_goes_on(folder: Path) -> None:
    train(2, "snapshot: 2", net=WIDER)
    train(4, "snapshot: 4")
    check("max_iter: 8 snapshot: 2", resume="x_iter_4.solverstate")
    with pytest.raises(ConfigError, match="x_iter_2.caffemodel is of another net .* would be removed"):
        check("max_iter: 8 snapshot: 2", resume="x_iter_4.solverstate", keep=RetentionPolicy(keep_last=3))


@pytest.mark.parametrize("content", [b"", b"no weights", b"\x89HDF\r\n\x1a\n damaged", None])
def test_a_damaged_file_does_not_stop_training(
    folder: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    train(4, "snapshot: 2")
    whole = (folder / "x_iter_4.caffemodel").read_bytes()
    (folder / "x_iter_4.caffemodel").write_bytes(whole[: len(whole) // 2] if content is None else content)
    check("max_iter: 4 snapshot: 2")
    assert "x_iter_4.caffemodel" in caplog.text and "training will replace it" in caplog.text


def test_shapes_are_read_without_arrays(folder: Path) -> None:
    """Of a file of 2 GB that takes no room on the disk."""
    elements = 500_000_000
    blob = field_header(bytes([BlobProto.DATA_FIELD_NUMBER << 3 | 2]), 4 * elements)
    shape = BlobProto(shape=BlobShape(dim=[1000, elements // 1000])).SerializeToString()
    head = LayerParameter(name="ip", type="InnerProduct").SerializeToString()
    inner = field_header(bytes([LayerParameter.BLOBS_FIELD_NUMBER << 3 | 2]), len(blob) + 4 * elements + len(shape))
    length = len(head) + len(inner) + len(blob) + 4 * elements + len(shape)
    layer = field_header(field_header(b"", NetParameter.LAYER_FIELD_NUMBER << 3 | 2), length)
    with (folder / "x.caffemodel").open("wb") as file:
        file.write(b"".join((layer, head, inner, blob)))
        file.seek(4 * elements, os.SEEK_CUR)
        file.write(shape)
    tracemalloc.start()
    (read,) = read_layer_shapes(folder / "x.caffemodel").layer
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (read.name, list(read.blobs[0].shape.dim)) == ("ip", [1000, elements // 1000])
    assert peak < 1 << 20


def test_shapes_of_files_of_older_caffes(folder: Path) -> None:
    """Layers under their old field, shapes as four numbers, and gradients beside the values."""
    net = NetParameter(name="old")
    layer = net.layers.add(name="conv")
    layer.blobs.add(num=2, channels=3, height=3, width=3, data=[0.5] * 54, diff=[0.5] * 54)
    layer.blobs.add(num=1, channels=1, height=1, width=2, double_data=[0.5] * 2)
    (folder / "x.caffemodel").write_bytes(net.SerializeToString())
    (read,) = read_layer_shapes(folder / "x.caffemodel").layer
    assert read.name == "conv"
    assert [blob_shape(blob) for blob in read.blobs] == [(2, 3, 3, 3), (1, 1, 1, 2)]
    assert not any(blob.data or blob.diff or blob.double_data for blob in read.blobs)
