"""Layers of the same name, as copied prototxts have them and Caffe allows."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from training import CPU, build_net, build_solver

from caffepy import pycaffe as caffe
from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.onnx_import.read import read_onnx
from caffepy.export.prepare import with_parameters
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.net import Net
from caffepy.pycaffe.device import cpu_device

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


SHARED = (
    INPUT
    + FIRST.replace('top: "a"', 'top: "a" param { name: "w" }')
    + (FIRST.replace('top: "a"', 'top: "b"') + FIRST.replace('top: "a"', 'top: "c" param { name: "w" }'))
)
"""Three layers of one name: the first owns the weights of the third, the second has its own."""


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


def test_each_layer_has_its_own_place_in_the_flat_buffers() -> None:
    net = build_net(NET, caffe_pb2.TRAIN)
    places = [(parameter.layer, parameter.start) for parameter in net.parameters.parameters]
    assert [layer for layer, _ in sorted(places, key=lambda place: place[1])] == [net.layers[3]] * 2 + [
        net.layers[1]
    ] * 2


def test_one_that_shares_a_parameter_does_not_make_the_others_share_theirs() -> None:
    net = build_net(SHARED)
    weights = [layer.blobs[0] for layer in net.layers if layer.type == "InnerProduct"]
    assert [blob.gradient_owner is blob for blob in weights] == [True, True, False]
    stored = net.to_proto()
    learned = [layer for layer in stored.layer if layer.blobs]
    learned[2].blobs[0].Clear()  # stored with its owner only, as in HDF5
    build_net(SHARED, seed=5).copy_trained_layers_from(stored, "file")
    learned[1].blobs[0].Clear()
    with pytest.raises(SnapshotError, match=r"layer 'ip' has 1 parameters there and 2 in the net \(missing: 0\)"):
        build_net(SHARED, seed=5).copy_trained_layers_from(stored, "file")


def test_layers_of_one_name_that_are_not_as_many_have_no_partners() -> None:
    """As where a deploy net has left one of them out: the others would get parameters of the wrong ones."""
    fewer = build_net(INPUT + FIRST.replace('top: "a"', 'top: "b"'), caffe_pb2.TEST)
    message = r"layers named 'ip' with parameters: 2 there, 1 in the net, so they cannot be matched"
    with pytest.raises(SnapshotError, match=f"file: {message}"):
        fewer.copy_trained_layers_from(build_net(NET).to_proto(), "file")
    with pytest.raises(ConfigError, match=message):
        fewer.share_trained_layers_with(build_net(NET))


def test_each_is_folded_with_its_own_parameters() -> None:
    param = parse_text(NET + 'layer { name: "ip" type: "TanH" bottom: "a" top: "t" }', caffe_pb2.NetParameter(), "net")
    net = build_net(NET + 'layer { name: "ip" type: "TanH" bottom: "a" top: "t" }')
    stored = [blob for layer in with_parameters(param, net).layer for blob in layer.blobs]
    for blob, values in zip(stored, weights(net), strict=True):
        np.testing.assert_array_equal(np.array(blob.data, np.float32).reshape(values.shape), values)


def test_each_is_read_back_from_onnx(tmp_path: Path) -> None:
    """Layers that become several nodes are described in the model's metadata."""
    norm = 'layer { name: "n" type: "Normalize" bottom: "%s" top: "%s" norm_param { %s } }'
    text = (
        INPUT.replace("dim: 3", "dim: 3 dim: 4 dim: 5")
        + norm % ("data", "x", "across_spatial: true")
        + norm % ("x", "y", "across_spatial: false")
    )
    net = build_net(text.replace('"n"', '"a"', 1).replace('"n"', '"a/b"'), caffe_pb2.TEST)
    same = build_net(text, caffe_pb2.TEST)
    for one in (net, same):
        (tmp_path / "model.onnx").write_bytes(serialised(to_model(one)))
        param = read_onnx(tmp_path / "model.onnx", "net")
        found = [layer.norm_param.across_spatial for layer in param.layer if layer.type == "Normalize"]
        assert found == [True, False]


def test_pycaffe_finds_the_blobs_of_each_by_its_number() -> None:
    net = caffe.Net.of(build_net(NET, caffe_pb2.TEST), cpu_device())
    assert [net._top_ids(index) for index in range(4)] == [[0], [1], [1], [2]]
    assert [net._bottom_ids(index) for index in range(4)] == [[], [0], [1], [1]]


SHAPES = """
layer {{ name: "d" type: "HDF5Data" top: "x" hdf5_data_param {{ source: "{0}" batch_size: 2 }} }}
layer {{ name: "d" type: "HDF5Data" top: "z" hdf5_data_param {{ source: "{0}" batch_size: 2 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param {{ num_output: 1 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "z" top: "iq" inner_product_param {{ num_output: 1 }} }}
layer {{ name: "ip" type: "EuclideanLoss" bottom: "ip" bottom: "iq" top: "l" }}
"""


def test_data_layers_of_one_name_have_shapes_of_their_own(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["z"] = np.zeros((10, 1), np.float32), np.zeros((10, 3, 2), np.float32)
    (tmp_path / "list").write_text(f"{tmp_path}/data.h5\n")
    solver = 'base_lr: 0 lr_policy: "fixed" snapshot_after_train: false test_iter: 1 test_interval: 1 '
    with build_solver(solver, SHAPES.format(tmp_path / "list")) as built:
        built.step(1)
        assert [built.net.blobs[name].shape for name in "xz"] == [(2, 1), (2, 3, 2)]


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
    message = "^two layers named 'ip' have parameters, "
    with pytest.raises(RunError, match=message), build_solver(text, NET):
        pytest.fail("this training would end at its first snapshot")
