"""Snapshots: formats, exact resumption, what is refused, what survives a full disk."""

from __future__ import annotations

import errno
import io
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import CPU, build_net, build_solver, weights_of

from caffepy.config.text import parse_text
from caffepy.data.schedule import Shard
from caffepy.errors import RunError, SnapshotError
from caffepy.files import atomic_write
from caffepy.layers.core.base import LayerContext
from caffepy.net import Net
from caffepy.net.weights import is_stored
from caffepy.proto import caffe_pb2
from caffepy.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.snapshot import binary
from caffepy.snapshot.files import newest_snapshot, read_state, read_weights
from caffepy.snapshot.hdf5 import write_state_hdf5, write_weights_hdf5

NET = """
name: "tiny"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 dim: 5 dim: 5 } shape { dim: 4 } data_filler { type: "gaussian" }
    data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv"
  param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 0 } }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" dropout_param { dropout_ratio: 0.3 } }
layer { name: "group/ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = (
    'base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 5 '
    'snapshot_prefix: "x" average_loss: 3 test_interval: 2 test_iter: 2 '
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(iterations: int, text: str = "", resume: str = "", net: str = NET, **keywords: Any) -> dict[str, np.ndarray]:
    with build_solver(SOLVER + f"max_iter: {iterations} " + text, net, **keywords) as solver:
        solver.solve(Path(resume) if resume else None)
        return weights_of(solver.net)


FORMATS = ["", "snapshot_format: HDF5 "]


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


def test_the_files_are_caffes(folder: Path) -> None:
    with build_solver(SOLVER + "max_iter: 4", NET) as solver:
        solver.step(4)
        assert solver.snapshot() == Path("x_iter_4.solverstate")
        state = SolverState.FromString((folder / "x_iter_4.solverstate").read_bytes())
        weights = NetParameter.FromString((folder / "x_iter_4.caffemodel").read_bytes())
        assert state.learned_net == "x_iter_4.caffemodel"
        assert (state.iter, state.current_step, state.solver_type) == (4, 1, "SGD")
        assert [tuple(h.shape.dim) for h in state.history] == [p.blob.shape for p in solver.net.parameters.parameters]
        assert [layer.name for layer in weights.layer] == ["data", "conv", "norm", "drop", "group/ip", "loss"]
        conv = np.array(weights.layer[1].blobs[0].data, np.float32).reshape(2, 3, 3, 3)
        np.testing.assert_array_equal(conv, solver.net.layers[1].blobs[0].host_data())
        assert not weights.layer[1].blobs[0].diff


def test_hdf5_is_laid_out_as_caffe_does(folder: Path) -> None:
    with build_solver(SOLVER + "snapshot_format: HDF5 snapshot_diff: true", NET) as solver:
        solver.step(1)
        solver.snapshot()
        with h5py.File(folder / "x_iter_1.caffemodel.h5") as file:
            np.testing.assert_array_equal(file["data/conv/0"][()], solver.net.layers[1].blobs[0].host_data())
            np.testing.assert_array_equal(file["diff/conv/0"][()], solver.net.layers[1].blobs[0].host_diff())
            assert set(file["data"]) == {"data", "conv", "norm", "drop", "group", "loss"}
        with h5py.File(folder / "x_iter_1.solverstate.h5") as file:
            assert file["iter"].shape == (1,)
            kind = file["learned_net"].id.get_type()
            assert (kind.get_strpad(), kind.get_size()) == (h5py.h5t.STR_NULLTERM, len("x_iter_1.caffemodel.h5") + 1)
            assert file["learned_net"][()] == b"x_iter_1.caffemodel.h5"
            assert file["history/0"].shape == (2, 3, 3, 3)
            assert len(file["history"]) == len(solver.net.parameters.parameters)


def test_shared_parameters_are_saved_once_in_hdf5() -> None:
    shared = """
    layer { name: "data" type: "DummyData" top: "data" dummy_data_param { shape { dim: 2 dim: 3 } } }
    layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" } param { name: "b" }
      inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
    layer { name: "c" type: "InnerProduct" bottom: "a" top: "c" param { name: "w" } param { }
      inner_product_param { num_output: 3 } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "data" top: "loss" }"""
    text = SOLVER.replace("test_interval: 2 test_iter: 2", "") + "snapshot_format: HDF5"
    shared = shared.replace('param { name: "w" } param { }', 'param { name: "w" } param { name: "b" }')
    with build_solver(text, shared) as solver:
        solver.step(2)
        solver.snapshot()
        saved = read_weights(Path("x_iter_2.caffemodel.h5"))
        assert [(layer.name, len(layer.blobs)) for layer in saved.layer] == [("a", 2)]
        wanted = weights_of(solver.net)
    with build_solver(text + " random_seed: 3", shared) as other:
        other.restore(Path("x_iter_2.solverstate.h5"))
        for name, values in wanted.items():
            np.testing.assert_array_equal(weights_of(other.net)[name], values)


def test_the_name_of_the_weights_may_be_any_path_and_brings_no_time_into_the_file() -> None:
    state = SolverState(iter=3, learned_net="ordner/Größe 3.caffemodel.h5")
    write_state_hdf5(Path("s.h5"), state, [np.ones(3, np.float32)])
    assert read_state(Path("s.h5")).learned_net == state.learned_net
    with h5py.File("s.h5") as file:
        assert h5py.h5g.get_objinfo(file.id, b"learned_net").mtime == 0, "equal snapshots have equal bytes"


SHARING = """
layer { name: "data" type: "DummyData" top: "data" dummy_data_param { shape { dim: 2 dim: 3 } } }
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } bias_filler { type: "gaussian" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" }
  inner_product_param { num_output: 3 bias_filler { type: "gaussian" } } }
"""


def test_a_layer_that_shares_its_first_parameter_and_owns_the_second() -> None:
    """Caffe's ToHDF5 writes the second alone, and CopyTrainedLayersFromHDF5 passes over the first."""
    net, other = build_net(SHARING), build_net(SHARING, seed=5)
    write_weights_hdf5(Path("w.h5"), net, False)
    with h5py.File("w.h5") as file:
        assert (set(file["data/a"]), set(file["data/b"])) == ({"0", "1"}, {"1"})
    saved = read_weights(Path("w.h5"))
    assert [[is_stored(blob) for blob in layer.blobs] for layer in saved.layer] == [[True, True], [False, True]]
    assert other.copy_trained_layers_from(saved, "w.h5") == ["a", "b"]
    for name, values in weights_of(net).items():
        np.testing.assert_array_equal(weights_of(other)[name], values)


def test_a_parameter_that_is_nowhere_is_refused() -> None:
    write_weights_hdf5(Path("w.h5"), build_net(SHARING), False)
    alone = build_net(SHARING.replace('name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" }',
                                      'name: "b" type: "InnerProduct" bottom: "a" top: "b"'))  # fmt: skip
    with pytest.raises(
        SnapshotError, match=r"w.h5: layer 'b' has 1 parameters there and 2 in the net \(not there: 0\)"
    ):
        alone.copy_trained_layers_from(read_weights(Path("w.h5")), "w.h5")


@pytest.mark.parametrize("key", ["x", "00", "1000", "-1"])
def test_a_dataset_that_is_no_parameter_is_refused(key: str) -> None:
    with h5py.File("w.h5", "w") as file:
        file[f"data/a/{key}"] = np.zeros(3, np.float32)
    with pytest.raises(SnapshotError, match=f"w.h5: layer 'a' has a dataset '{key}', which is no parameter's number"):
        read_weights(Path("w.h5"))


def test_layers_within_layers_as_caffe_writes_them() -> None:
    """The groups of `conv1/bn` and of layers without parameters lie within that of `conv1`."""
    with h5py.File("w.h5", "w") as file:
        for name, count in {"conv1": 2, "conv1/bn": 3, "conv1/bn/deep": 1, "conv1/relu": 0, "in/1x1": 1}.items():
            group = file.require_group(f"data/{name}")
            for index in range(count):
                group[str(index)] = np.full((2,), index, np.float32)
    with h5py.File("w.h5") as file:
        assert len(file["data/conv1"]) == 4
    saved = {layer.name: len(layer.blobs) for layer in read_weights(Path("w.h5")).layer}
    assert saved == {"conv1": 2, "conv1/bn": 3, "conv1/bn/deep": 1, "in/1x1": 1}


def named_layers(names: list[str]) -> caffe_pb2.NetParameter:
    """A chain of InnerProducts of these names, every second of which takes its weights from the one before."""
    param = parse_text(SHARING, caffe_pb2.NetParameter(), "net.prototxt")
    first, second = param.layer[1], param.layer[2]
    del param.layer[1:]
    param.layer[0].name = "the input, which has no parameters"
    for number, name in enumerate(names):
        layer = param.layer.add()
        layer.CopyFrom(first if number % 2 == 0 else second)
        layer.name, layer.top[0] = name, f"top {number}"
        layer.bottom[0] = f"top {number - 1}" if number else "data"
        layer.param[0].name = f"w{number // 2}"
    return param


odd_names = ["a", "a/0", "a/1", "a/0/0", "a/b", "a//b", "a/", "/a", "/", ".", "..", "a/.", "%", "%a", "%%2Fa", ""]
name_parts = ["conv1", "bn", "0", "1", "10", "", ".", "é", "%2F", "data"]
layer_names = st.one_of(
    st.sampled_from(odd_names),
    st.lists(st.sampled_from(name_parts), min_size=1, max_size=4).map("/".join),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


@settings(deadline=None, max_examples=100)
@given(names=st.lists(layer_names, min_size=1, max_size=6, unique=True))
def test_any_layer_names_survive_hdf5(names: list[str]) -> None:
    param = named_layers(names)
    net, other = (Net(param, LayerContext(CPU, seed=seed)) for seed in (1, 2))
    path = Path("names.h5")
    write_weights_hdf5(path, net, True)
    assert sorted(other.copy_trained_layers_from(read_weights(path), "names.h5")) == sorted(names)
    for mine, theirs in zip(other.layers, net.layers, strict=True):
        for blob, wanted in zip(mine.blobs, theirs.blobs, strict=True):
            np.testing.assert_array_equal(blob.host_data(), wanted.host_data())
    with h5py.File(path) as file:
        assert set(file) == {"data", "diff"}, "no name reaches the file's root"
        found = [item for item in diffs_of(file) if item[1] == (3, 3)]
        assert len(found) == len(names), "every layer's gradients, of shared weights too"


def diffs_of(file: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Path and shape of every gradient."""
    found: list[tuple[str, tuple[int, ...]]] = []
    file["diff"].visititems(
        lambda name, item: found.append((name, item.shape)) if isinstance(item, h5py.Dataset) else None
    )
    return found


def test_two_layers_of_one_name_cannot_be_held_in_hdf5() -> None:
    net = Net(named_layers(["a", "a"]), LayerContext(CPU))
    with pytest.raises(RunError, match="two layers of the name 'a' have parameters.* set snapshot_format: BINARYPROTO"):
        write_weights_hdf5(Path("w.h5"), net, False)


def test_weights_are_also_found_beside_the_state(folder: Path) -> None:
    train(2)
    (folder / "moved").mkdir()
    for kind in ("caffemodel", "solverstate"):
        (folder / f"x_iter_2.{kind}").rename(folder / "moved" / f"x_iter_2.{kind}")
    train(4, resume="moved/x_iter_2.solverstate")
    (folder / "moved" / "x_iter_2.caffemodel").unlink()
    with pytest.raises(SnapshotError, match="its weights x_iter_2.caffemodel are not there, nor moved/x_iter_2"):
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
        ("", NET.replace("inner_product_param {", "inner_product_param { bias_term: false"),
         "holds 7 history blobs, a SGD solver of this net has 6"),
    ],
)  # fmt: skip
def test_a_state_of_another_solver_or_net_is_refused(text: str, net: str, message: str) -> None:
    train(2)
    with pytest.raises(SnapshotError, match=message):
        train(4, text, "x_iter_2.solverstate", net)


def test_caffes_state_of_another_rule_is_refused_by_its_history() -> None:
    train(2)
    state = SolverState.FromString(Path("x_iter_2.solverstate").read_bytes())
    state.ClearField("solver_type")
    Path("x_iter_2.solverstate").write_bytes(state.SerializeToString())
    with pytest.raises(SnapshotError, match="holds 7 history blobs, a Adam solver of this net has 14"):
        train(4, 'type: "Adam"', "x_iter_2.solverstate")


@pytest.mark.parametrize("form", FORMATS)
def test_weights_in_place_of_a_state_are_refused(form: str) -> None:
    train(2, form)
    with pytest.raises(SnapshotError, match="it is a .caffemodel; load it with --weights|is no .solverstate.h5 but a"):
        train(4, form, "x_iter_2.caffemodel" + (".h5" if form else ""))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["solverstate", "caffemodel"])
def test_truncated_files_are_refused(form: str, kind: str) -> None:
    train(2, form)
    end = ".h5" if form else ""
    path = Path(f"x_iter_2.{kind}{end}")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SnapshotError, match=f"x_iter_2.{kind}{end}: .*truncated"):
        train(4, form, f"x_iter_2.solverstate{end}")


def test_missing_files_are_refused() -> None:
    with pytest.raises(SnapshotError, match="nothing.solverstate"):
        train(4, resume="nothing.solverstate")


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


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many more bytes the disk takes; empty: any number."""
    room: list[int] = []

    class FullFile(io.FileIO):
        def write(self, content: Any) -> int:
            if room:
                room[0] -= len(content)
                if room[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    monkeypatch.setattr(binary, "open", lambda path, mode: FullFile(path, mode[0]), raising=False)
    return room


@pytest.mark.parametrize("room", [0, 600, 1100])
def test_a_full_disk_leaves_the_older_snapshot(folder: Path, full_disk: list[int], room: int) -> None:
    with build_solver(SOLVER, NET) as solver:
        solver.step(2)
        solver.snapshot()
        older = {path.name: path.read_bytes() for path in folder.iterdir()}
        full_disk.append(room)
        with pytest.raises(RunError, match="x_iter_2.*cannot be written: No space left on device"):
            solver.snapshot()
        with pytest.raises(RunError, match="x_iter_3.*cannot be written: No space left on device"):
            full_disk[0] = room
            solver.step(1)
            solver.snapshot()
    for name, content in older.items():
        assert (folder / name).read_bytes() == content
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert newest_snapshot("x") == Path("x_iter_2.solverstate")


@pytest.mark.parametrize("form", FORMATS)
def test_the_systems_own_limit_on_files(folder: Path, form: str) -> None:
    """A real failure of the system's write, which HDF5 meets inside its library."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with build_solver(SOLVER + form, NET) as solver:
        solver.step(1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
            with pytest.raises(RunError, match="x_iter_1.caffemodel.*: cannot be written: .*File too large"):
                solver.snapshot()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(folder.iterdir()) == []
        solver.snapshot()
    assert newest_snapshot("x") is not None


def test_a_file_that_cannot_be_synced_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="a: cannot be written: Input/output error"), atomic_write(folder / "a") as path:
        path.write_bytes(b"x")
    assert list(folder.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(folder: Path) -> None:
    (folder / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(folder / "a") as path:
        path.write_bytes(b"new")
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"old"}


def test_a_folder_that_is_not_there(folder: Path) -> None:
    with pytest.raises(RunError, match="No such file or directory"), atomic_write(folder / "b" / "a") as path:
        path.write_bytes(b"x")


def test_a_binary_snapshot_too_large_for_protobuf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.config.load.MAX_BYTES", 700)
    with (
        build_solver(SOLVER, NET) as solver,
        pytest.raises(RunError, match="larger than the 700 bytes .* set snapshot_format: HDF5"),
    ):
        solver.snapshot()
