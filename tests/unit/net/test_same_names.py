"""Layers of the same name, as copied prototxts have them and Caffe allows."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from training import CPU, build_net, build_solver

from caffepy.errors import RunError
from caffepy.net import Net
from caffepy.proto import caffe_pb2

INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 40 dim: 3 } } }'
FIRST = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "a"
  inner_product_param { num_output: 3 weight_filler { type: "gaussian" } } }
"""
NET = f"""
{INPUT} {FIRST} layer {{ name: "ip" type: "ReLU" bottom: "a" top: "a" }}
{FIRST.replace('"data"', '"a"').replace('top: "a"', 'top: "b"')}
"""


def weights(net: Net) -> list[np.ndarray]:
    return [blob.host_data() for layer in net.layers for blob in layer.blobs]


def test_each_starts_with_numbers_of_its_own() -> None:
    first, _, second, _ = weights(build_net(NET))
    assert (first != second).all()
    np.testing.assert_array_equal(weights(build_net(INPUT + FIRST))[0], first)


def test_each_drops_elements_of_its_own() -> None:
    net = build_net(INPUT + "".join(f'layer {{ name: "d" type: "Dropout" bottom: "data" top: "{t}" }}' for t in "ab"))
    CPU.fill(net.blobs["data"].data, 1.0)
    net.forward()
    assert 0.2 < (net.blobs["a"].host_data() == net.blobs["b"].host_data()).mean() < 0.8


def test_each_draws_data_of_its_own() -> None:
    data = """layer { name: "d" type: "DummyData" top: "%s"
      dummy_data_param { shape { dim: 9 } data_filler { type: "gaussian" } } }"""
    net = build_net(data % "a" + data % "b")
    net.forward()
    assert (net.blobs["a"].host_data() != net.blobs["b"].host_data()).all()


def test_each_gets_its_own_stored_parameters() -> None:
    net, other = build_net(NET), build_net(NET, seed=5)
    assert other.copy_trained_layers_from(net.to_proto(), "file") == ["ip", "ip"]
    for mine, theirs in zip(weights(other), weights(net), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_each_of_a_test_net_uses_its_own_of_the_train_net() -> None:
    train, test = build_net(NET), build_net(NET, caffe_pb2.TEST, seed=9)
    test.share_trained_layers_with(train)
    for mine, theirs in zip(weights(test), weights(train), strict=True):
        np.testing.assert_array_equal(mine, theirs)


HDF5 = """
layer {{ name: "d" type: "HDF5Data" top: "x" hdf5_data_param {{ source: "{0}" batch_size: 1 }} }}
layer {{ name: "d" type: "HDF5Data" top: "y" hdf5_data_param {{ source: "{0}" batch_size: 3 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param {{ num_output: 1 }} }}
"""


def test_each_goes_on_with_its_own_data(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = file["y"] = np.arange(10, dtype=np.float32).reshape(10, 1)
    (tmp_path / "list").write_text(f"{tmp_path}/data.h5\n")
    solver = f'base_lr: 0 lr_policy: "fixed" max_iter: 9 snapshot_prefix: "{tmp_path}/s"'
    with build_solver(solver, HDF5.format(tmp_path / "list")) as whole:
        whole.step(2)
        whole.snapshot()
        whole.step(1)
        wanted = [whole.net.blobs[name].host_data() for name in "xy"]
    with build_solver(solver, HDF5.format(tmp_path / "list")) as resumed:
        resumed.restore(tmp_path / "s_iter_2.solverstate")
        resumed.step(1)
        for name, values in zip("xy", wanted, strict=True):
            np.testing.assert_array_equal(resumed.net.blobs[name].host_data(), values)


def test_hdf5_which_cannot_hold_them_is_refused_before_training(tmp_path: Path) -> None:
    text = f'base_lr: 0 lr_policy: "fixed" snapshot: 5 snapshot_prefix: "{tmp_path}/s" snapshot_format: HDF5'
    message = "^two layers of the name 'ip' have parameters, which HDF5 cannot hold; "
    with pytest.raises(RunError, match=message), build_solver(text, NET):
        pytest.fail("this training would end at its first snapshot")
