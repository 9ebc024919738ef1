"""The HDF5 format: Caffe's layout, any layer's name, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_runs import NET, SOLVER
from training import CPU, build_net, build_solver, weights_of

from caffepy.errors import RunError, SnapshotError
from caffepy.formats.binary import is_stored
from caffepy.formats.caffemodel import read_weights, write_caffemodel
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.formats.prototxt import parse_text
from caffepy.formats.solverstate import read_solverstate, write_solverstate
from caffepy.layers.layer import LayerContext
from caffepy.net import Net


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
    write_solverstate(Path("s.h5"), state, [np.ones(3, np.float32)])
    assert read_solverstate(Path("s.h5")).message.learned_net == state.learned_net
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
    write_caffemodel(Path("w.h5"), net.name, net.layers)
    with h5py.File("w.h5") as file:
        assert (set(file["data/a"]), set(file["data/b"])) == ({"0", "1"}, {"1"})
    saved = read_weights(Path("w.h5"))
    assert [[is_stored(blob) for blob in layer.blobs] for layer in saved.layer] == [[True, True], [False, True]]
    assert other.copy_trained_layers_from(saved, "w.h5") == ["a", "b"]
    for name, values in weights_of(net).items():
        np.testing.assert_array_equal(weights_of(other)[name], values)


def test_a_parameter_that_is_nowhere_is_refused() -> None:
    net = build_net(SHARING)
    write_caffemodel(Path("w.h5"), net.name, net.layers)
    alone = build_net(
        SHARING.replace(
            'name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" }',
            'name: "b" type: "InnerProduct" bottom: "a" top: "b"',
        )
    )
    with pytest.raises(SnapshotError, match=r"w.h5: layer 'b' has 1 parameters there and 2 in the net \(missing: 0\)"):
        alone.copy_trained_layers_from(read_weights(Path("w.h5")), "w.h5")


@pytest.mark.parametrize("key", ["x", "00", "1000", "-1"])
def test_a_dataset_that_is_no_parameter_is_refused(key: str) -> None:
    with h5py.File("w.h5", "w") as file:
        file[f"data/a/{key}"] = np.zeros(3, np.float32)
    with pytest.raises(SnapshotError, match=f"w.h5: layer 'a' has a dataset '{key}', which is not a parameter index"):
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


@settings(max_examples=100)
@given(names=st.lists(layer_names, min_size=1, max_size=6, unique=True))
def test_any_layer_names_survive_hdf5(names: list[str]) -> None:
    param = named_layers(names)
    net, other = (Net(param, LayerContext(CPU, seed=seed)) for seed in (1, 2))
    path = Path("names.h5")
    write_caffemodel(path, net.name, net.layers, True)
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
    with pytest.raises(RunError, match="two layers named 'a' have parameters.* set snapshot_format: BINARYPROTO"):
        write_caffemodel(Path("w.h5"), net.name, net.layers)


SECRET = np.arange(4, dtype=np.float32)


def test_a_checksum_that_was_lost_or_changed() -> None:
    state = SolverState(iter=3, learned_net="x", blob_count=1)
    write_solverstate(Path("s.h5"), state, [SECRET])
    with h5py.File("s.h5", "a") as file:
        value = int(file.attrs["caffepy_crc32c"])
        file.attrs["caffepy_crc32c"] = np.uint32(value ^ 1)
    with pytest.raises(SnapshotError, match=f"s.h5: .* its checksum is {value:08x}, but {value ^ 1:08x} was"):
        read_solverstate(Path("s.h5"), strict=True)
    with h5py.File("s.h5", "a") as file:
        del file.attrs["caffepy_crc32c"]
    assert not read_solverstate(Path("s.h5"), strict=True).message.HasField("crc32c")
    with h5py.File("s.h5", "a") as file:
        file.attrs["caffepy_crc32c"] = "no number"
    with pytest.raises(SnapshotError, match="s.h5.*the attribute 'caffepy_crc32c' is not an integer"):
        read_solverstate(Path("s.h5"))


def test_what_other_programs_write_is_read() -> None:
    """Doubles, halves and packed datasets, a string of variable length; an attribute of theirs is no harm."""
    with h5py.File("w.h5", "w") as file:
        file["data/ip/0"] = np.arange(6, dtype=np.float64).reshape(2, 3)
        file.create_dataset("data/ip/1", data=np.arange(2, dtype=np.float16), chunks=(2,), compression="gzip")
        file["data/bn/0"] = h5py.SoftLink("/data/ip/1")
        file.attrs["made by"] = "somebody"
    layers = {layer.name: layer.blobs for layer in read_weights(Path("w.h5")).layer}
    assert [list(blob.shape.dim) for blob in layers["ip"]] == [[2, 3], [2]]
    assert list(layers["ip"][0].data) == [0, 1, 2, 3, 4, 5]
    assert list(layers["bn"][0].data) == [0, 1]
    with h5py.File("s.h5", "w") as file:
        file["iter"] = np.array([3], np.int32)
        file["learned_net"] = "Größe.caffemodel.h5"
        file.create_group("history")
    assert read_solverstate(Path("s.h5")).message.learned_net == "Größe.caffemodel.h5"
