"""Layers: those of a net, a user's Python layers, and layers by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from caffepy import pycaffe as caffe
from caffepy.errors import ConfigError
from caffepy.pycaffe.blob import BlobVec
from caffepy.pycaffe.layer import LayerBase

MODULE = '''
from caffepy import pycaffe as caffe

class Times(caffe.Layer):
    """Multiplies by its parameter, and counts its calls."""
    def setup(self, bottom, top):
        self.calls = 0
        self.factor = float(self.param_str or 1)
        self.blobs.add_blob(1)
        self.blobs[0].data[0] = self.factor
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)
    def forward(self, bottom, top):
        self.calls += 1
        top[0].data[...] = self.blobs[0].data[0] * bottom[0].data
    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[0] += (top[0].diff * bottom[0].data).sum()
        if propagate_down[0]:
            bottom[0].diff[...] = self.blobs[0].data[0] * top[0].diff

class Phase(caffe.Layer):
    def setup(self, bottom, top): pass
    def reshape(self, bottom, top): top[0].reshape()
    def forward(self, bottom, top): top[0].data[()] = self.phase

class Failing(caffe.Layer):
    def setup(self, bottom, top):
        if self.param_str == "setup": raise OSError("in setup")
    def reshape(self, bottom, top): top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top): raise ZeroDivisionError("in forward")
'''

NET = """
name: 'n' force_backward: true input: 'data' input_shape { dim: 2 dim: 3 dim: 2 dim: 2 }
layer { name: 'times' type: 'Python' bottom: 'data' top: 'out'
  python_param { module: 'pycaffe_layers' layer: '%s' param_str: '%s' } }
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pycaffe_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("pycaffe_layers", None)


@pytest.fixture
def net(write) -> caffe.Net:
    return caffe.Net(write("times.prototxt", NET % ("Times", "2.5")), caffe.TRAIN)


def test_layer_types() -> None:
    types = caffe.layer_type_list()
    assert {"Convolution", "Data", "Python", "PriorBox"} <= set(types) and types == sorted(types)


def test_a_python_layer_of_a_net_is_the_users_object(net: caffe.Net) -> None:
    layer = net.layer_dict["times"]
    assert isinstance(layer, caffe.Layer) and type(layer).__name__ == "Times" and layer.type == "Python"
    net.forward()
    assert (layer.calls, layer.factor, layer.phase) == (1, 2.5, caffe.TRAIN)


def test_its_numbers_go_both_ways(net: caffe.Net, tmp_path: Path) -> None:
    layer = net.layers[1]
    net.blobs["data"].data[...] = 3
    net.blobs["out"].diff[...] = 2
    assert (net.forward()["out"] == 7.5).all() and (net.backward()["data"] == 5).all()
    assert layer.blobs[0].diff[0] == net.params["times"][0].diff[0] == 2 * 3 * 24
    net.backward()
    assert layer.blobs[0].diff[0] == 2 * (2 * 3 * 24)
    net.clear_param_diffs()
    assert layer.blobs[0].diff[0] == 0
    layer.blobs[0].data[0] += 1
    assert (net.forward()["out"] == 10.5).all()
    net.save(tmp_path / "w")
    layer.blobs[0].data[0] = -1
    net.copy_from(tmp_path / "w")
    assert layer.blobs[0].data[0] == 3.5


def test_it_follows_the_inputs_shape(net: caffe.Net) -> None:
    net.blobs["data"].reshape(4, 5)
    assert net.forward()["out"].shape == (4, 5)


def test_it_knows_the_phase(write) -> None:
    path = write("phase.prototxt", NET.replace("bottom: 'data'", "") % ("Phase", ""))
    for phase in (caffe.TRAIN, caffe.TEST):
        assert caffe.Net(path, phase).forward()["out"] == phase


def test_what_it_raises_comes_out(write) -> None:
    with pytest.raises(OSError, match="in setup") as raised:
        caffe.Net(write("setup.prototxt", NET % ("Failing", "setup")), caffe.TRAIN)
    assert "layer 'times' (Python): setup:" in raised.value.__notes__[0]
    net = caffe.Net(write("forward.prototxt", NET % ("Failing", "")), caffe.TRAIN)
    with pytest.raises(ZeroDivisionError, match="in forward"):
        net.forward()


def test_a_solver_trains_it(write, tmp_path: Path) -> None:
    loss = (
        "layer { name: 'zero' type: 'DummyData' top: 'zero' "
        "dummy_data_param { shape { dim: 2 dim: 3 dim: 2 dim: 2 } } }"
        "layer { name: 'loss' type: 'EuclideanLoss' bottom: 'out' bottom: 'zero' top: 'loss' }"
    )
    path = write("train.prototxt", NET % ("Times", "2") + loss)
    solver = caffe.SGDSolver(
        write("solver.prototxt", f"net: '{path}' base_lr: 0.1 lr_policy: 'fixed' snapshot_prefix: '{tmp_path}/m'")
    )
    solver.net.blobs["data"].data[...] = 1
    solver.step(1)
    # loss = sum (2 x)^2 / (2 N): its derivative by the factor is 2 * 24 / 2
    np.testing.assert_allclose(solver.net.params["times"][0].data, [2 - 0.1 * 24], rtol=1e-5)
    np.testing.assert_allclose(solver.net.layers[1].blobs[0].data, [2 - 0.1 * 24], rtol=1e-5)


CONVOLUTION = "name: 'c' type: 'Convolution' convolution_param { num_output: 2 kernel_size: 1 }"


def test_a_layer_by_itself() -> None:
    layer = caffe.create_layer(f"{CONVOLUTION} ")
    bottom, top = BlobVec(), BlobVec()
    bottom.add_blob(1, 3, 2, 2)
    top.add_blob()
    layer.SetUp(bottom, top)
    assert [blob.shape for blob in layer.blobs] == [(2, 3, 1, 1), (2,)] and top[0].shape == (1, 2, 2, 2)
    bottom[0].data[...], layer.blobs[0].data[...], layer.blobs[1].data[...] = 2, 1, 0.5
    assert layer.Forward(bottom, top) == 0 and (top[0].data == 6.5).all()
    top[0].diff[...] = 1
    layer.Backward(top, [True], bottom)
    layer.Backward(top, [True], bottom)
    assert (bottom[0].diff == 2).all() and (layer.blobs[1].diff == 8).all()
    bottom[0].reshape(1, 3, 1, 1)
    layer.Reshape(bottom, top)
    assert top[0].shape == (1, 2, 1, 1) and repr(layer) == "<caffe.Layer 'c' of type Convolution>"
    assert isinstance(layer, LayerBase)


def test_a_loss_layer_by_itself_returns_its_loss() -> None:
    layer = caffe.create_layer("name: 'l' type: 'EuclideanLoss' loss_weight: 2")
    bottom, top = BlobVec(), BlobVec()
    for _ in range(2):
        bottom.add_blob(1, 4)
    top.add_blob()
    layer.SetUp(bottom, top)
    bottom[0].data[...] = 3
    assert layer.Forward(bottom, top) == 2 * 18 and top[0].data == 18
    layer.Backward(top, [True, False], bottom)
    assert (bottom[0].diff == 6).all()


def test_layer_parameters() -> None:
    parameter = caffe.LayerParameter(CONVOLUTION)
    assert parameter.to_python().convolution_param.num_output == 2
    parameter.from_python(caffe.proto.caffe_pb2.LayerParameter(name="r", type="ReLU"))
    assert caffe.create_layer(parameter).type == "ReLU"
    with pytest.raises(RuntimeError, match="not a LayerParameter in text form: 1:1"):
        caffe.LayerParameter("nme: 3")
    with pytest.raises(RuntimeError, match="a LayerParameter or its text is needed, not int"):
        caffe.create_layer(3)
    with pytest.raises(ConfigError, match="unknown layer type 'Relu'; did you mean 'ReLU'"):
        caffe.create_layer("name: 'r' type: 'Relu'")
