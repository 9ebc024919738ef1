"""The net: running, losses, reshaping, copying and saving parameters, debug lines."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_graph_backend import OwnStream
from training import CPU, build_net, weights_of

from caffepy import register_layer
from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.activation import ReLULayer
from caffepy.layers.inner_product import InnerProductLayer
from caffepy.layers.layer import Layer, LayerContext
from caffepy.layers.loss import EuclideanLossLayer
from caffepy.logs.trace import Trace
from caffepy.net import Net

DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 } data_filler { type: "gaussian" } } }
"""
IP = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" loss_weight: 0.5 }'


def test_layers_are_traced_by_what_the_net_was_made_with() -> None:
    trace = Trace(range(1))
    trace.begin(0)
    net = Net(build_net(DATA + IP + LOSS).param, LayerContext(CPU), trace=trace)
    net.forward()
    net.backward()
    assert {(span.row, span.name) for span in trace.spans()} >= {("forward", "ip"), ("backward", "ip")}


def test_reversed_passes_leave_out_user_defined_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("forward", "backward"):
        for cls in (InnerProductLayer, EuclideanLossLayer, ReLULayer):
            monkeypatch.setattr(cls, name, lambda self, *_, name=name: ran.append(f"{self.name} {name}"))
    register_layer("OfAProgram", type("OfAProgram", (ReLULayer,), {}))
    own = 'layer { name: "own" type: "OfAProgram" bottom: "ip" top: "ip" }'
    for run in build_net(DATA + IP + own + LOSS).reversed_passes():
        run()
    assert ran == ["ip backward", "loss backward", "loss forward", "ip forward"]


def test_the_loss_is_weighted() -> None:
    net = build_net(DATA + IP + LOSS)
    net.forward()
    assert net.loss() == pytest.approx(0.5 * float(net.blobs["loss"].host_data()))
    assert net.loss_weight(net.blobs["loss"]) == 0.5
    assert net.loss_weight(net.blobs["ip"]) == 0


def test_a_loss_weight_on_any_layer_counts_its_sum_and_is_its_gradient() -> None:
    weighted = IP.replace('top: "ip"', 'top: "ip" loss_weight: 3')
    net = build_net(DATA + weighted + LOSS)
    net.forward()
    net.backward()
    difference = net.blobs["ip"].host_data() - net.blobs["label"].host_data()
    wanted = 3 * net.blobs["ip"].host_data().sum() + 0.5 * (difference**2).sum() / 8
    assert net.loss() == pytest.approx(wanted, rel=1e-5)
    gradient = 3 + 0.5 * difference / 4
    bias = net.layers[net.layer_names.index("ip")].blobs[1]
    np.testing.assert_allclose(bias.host_diff(), gradient.sum(axis=0), rtol=1e-5)


def test_passes_are_counted_after_each_forward() -> None:
    net = build_net(DATA + IP + LOSS)
    assert net.context.passes.number == 0
    net.forward()
    net.forward()
    assert net.context.passes.number == 2


def test_layers_are_reshaped_only_when_a_bottom_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 } } }'
    net = build_net(text + IP)
    calls: list[str] = []
    for layer in net.layers:
        original = layer.reshape
        monkeypatch.setattr(layer, "reshape", lambda b, t, o=original, n=layer.name: (calls.append(n), o(b, t)))
    net.forward()
    assert calls == []
    net.blobs["data"].reshape((7, 3))
    net.forward()
    assert calls == ["ip"]
    assert net.blobs["ip"].shape == (7, 2)
    net.reshape()
    assert calls == ["ip", "in", "ip"]


def test_inputs_and_batch_size() -> None:
    net = build_net('layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 } } }' + IP)
    assert net.inputs == ["data"]
    assert net.batch_size() == 4
    assert list(net.blobs) == ["data", "ip"]


def test_an_unforeseen_error_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build_net(DATA + IP + LOSS)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(net.layers[1], "forward", fail)
    with pytest.raises(RunError, match=r"layer 'ip' \(InnerProduct\): ZeroDivisionError: oops"):
        net.forward()


def test_layers_are_checked_after_each_forward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build_net(DATA + IP + LOSS)
    checked: list[Layer] = []
    for layer in net.layers:
        monkeypatch.setattr(layer, "raise_device_errors", lambda la=layer: checked.append(la))
    net.forward()
    assert checked == net.layers


def test_saving_and_loading_keeps_every_bit() -> None:
    net = build_net('name: "tiny"' + DATA + IP + LOSS)
    net.forward()
    net.backward()
    saved = caffe_pb2.NetParameter.FromString(net.to_proto(write_diff=True).SerializeToString())
    assert saved.name == "tiny"
    assert [layer.name for layer in saved.layer] == ["data", "ip", "loss"]
    assert all(layer.phase == caffe_pb2.TRAIN for layer in saved.layer)
    assert list(saved.layer[1].blobs[0].shape.dim) == [2, 3]
    np.testing.assert_array_equal(
        np.array(saved.layer[1].blobs[0].diff, np.float32).reshape(2, 3), net.layers[1].blobs[0].host_diff()
    )
    other = build_net(DATA + IP + LOSS, seed=5)
    assert other.copy_trained_layers_from(saved, "file") == ["ip"]
    for name, values in weights_of(other).items():
        np.testing.assert_array_equal(values, weights_of(net)[name])


def test_layers_of_other_names_are_passed_over() -> None:
    net = build_net(DATA + IP + LOSS)
    weights = caffe_pb2.NetParameter()
    weights.layer.add(name="other").blobs.add(data=[1.0])
    before = weights_of(net)
    assert net.copy_trained_layers_from(weights, "file") == []
    np.testing.assert_array_equal(weights_of(net)["ip_0"], before["ip_0"])


def test_weights_of_another_net_are_said(caplog: pytest.LogCaptureFixture) -> None:
    weights = caffe_pb2.NetParameter()
    weights.layer.add(name="fc7").blobs.add(data=[1])
    with caplog.at_level("WARNING"):
        assert build_net(DATA + IP + LOSS).copy_trained_layers_from(weights, "vgg.caffemodel") == []
    assert "vgg.caffemodel: no layer was copied: it has none of the net's layers (ip)" in caplog.text


def test_old_four_number_shapes_fit() -> None:
    net = build_net(DATA + IP + LOSS)
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name="ip")
    layer.blobs.add(num=1, channels=1, height=2, width=3, data=range(6))
    layer.blobs.add(num=1, channels=1, height=1, width=2, data=[7, 8])
    net.copy_trained_layers_from(weights, "file")
    np.testing.assert_array_equal(weights_of(net)["ip_0"], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("fields", [{"double_data": [1, 2]}, {"raw_data": np.array([1, 2], "<f2").tobytes()}])
def test_doubles_and_nvidias_raw_data(fields: dict[str, object]) -> None:
    net = build_net(DATA + IP + LOSS)
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name="ip")
    layer.blobs.add(shape=caffe_pb2.BlobShape(dim=[2, 3]), data=range(6))
    blob = layer.blobs.add(shape=caffe_pb2.BlobShape(dim=[2]), **fields)
    if "raw_data" in fields:
        blob.raw_data_type = caffe_pb2.FLOAT16
    net.copy_trained_layers_from(weights, "file")
    np.testing.assert_array_equal(weights_of(net)["ip_1"], [1, 2])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 4), (2,)], "w.caffemodel: layer 'ip', parameter 0: shape is 2 4 .8. there and 2 3 .6. in the net"),
        ([(2, 3)], "layer 'ip' has 1 parameters there and 2 in the net"),
        ([(2, 3), (2,), (1,)], "layer 'ip' has 3 parameters there and 2 in the net"),
    ],
)
def test_weights_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    net = build_net(DATA + IP + LOSS)
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name="ip")
    for shape in shapes:
        layer.blobs.add(shape=caffe_pb2.BlobShape(dim=shape), data=np.zeros(shape).ravel())
    with pytest.raises(SnapshotError, match=message):
        net.copy_trained_layers_from(weights, "w.caffemodel")


def test_a_test_net_uses_the_train_nets_parameters() -> None:
    train = build_net(DATA + IP + LOSS)
    test = build_net(DATA + IP + LOSS, caffe_pb2.TEST, seed=9)
    test.share_trained_layers_with(train)
    CPU.fill(train.parameters.data, 2.0)
    np.testing.assert_array_equal(weights_of(test)["ip_0"], np.full((2, 3), 2.0))
    assert test.parameters is train.parameters


def test_sharing_with_a_net_of_other_shapes_is_refused() -> None:
    train = build_net(DATA + IP + LOSS)
    test = build_net(DATA + IP.replace("num_output: 2", "num_output: 5"), caffe_pb2.TEST)
    with pytest.raises(ConfigError, match=r"layer 'ip'.*5 3 \(15\), 5 \(5\) here and 2 3 \(6\), 2 \(2\) there"):
        test.share_trained_layers_with(train)


def test_debug_lines_are_caffes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    net = build_net("debug_info: true" + DATA + IP + LOSS)
    caplog.clear()
    net.forward()
    net.backward()
    lines = [record.getMessage() for record in caplog.records]
    mean = np.abs(net.blobs["ip"].host_data()).mean()
    assert f"    [Forward] Layer ip, top blob ip data: {mean:.6g}" in lines
    assert any(line.startswith("    [Forward] Layer ip, param blob 0 data: ") for line in lines)
    assert any(line.startswith("    [Backward] Layer loss, bottom blob ip diff: ") for line in lines)
    assert any(line.startswith("    [Backward] Layer ip, param blob 1 diff: ") for line in lines)
    weights = np.concatenate([w.ravel() for w in weights_of(net).values()])
    assert lines[-1].startswith(
        f"    [Backward] All net params (data, diff): L1 norm = ({np.abs(weights).sum(dtype=np.float64):.6g}, "
    )


def test_the_first_layer_that_is_not_finite() -> None:
    net = build_net(DATA + IP + LOSS)
    net.forward()
    assert net.first_non_finite() is None
    CPU.fill(net.layers[1].blobs[1].data, float("nan"))
    net.forward()
    found = net.first_non_finite()
    assert found is not None
    assert found.layer.name == "ip"


STREAM_NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" batch_norm_param { use_global_stats: true } }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "m" type: "BatchNorm" bottom: "c" top: "m" batch_norm_param { use_global_stats: true } }
layer { name: "i" type: "InnerProduct" bottom: "m" top: "i"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "DummyData" top: "label" dummy_data_param { shape { dim: 2 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("phase", [caffe_pb2.TRAIN, caffe_pb2.TEST])
def test_a_net_is_made_on_the_stream_of_its_device(phase: int, fuse: bool) -> None:
    """Also where the program has another stream: what layers write when they are made must not be cleared later."""
    found = []
    for backend in (CPU, OwnStream()):
        param = parse_text(STREAM_NET, caffe_pb2.NetParameter(), "net")
        net = Net(param, LayerContext(backend, phase, seed=3), fuse=fuse)
        data = net.blobs["data"].data
        with backend.activate():
            backend.from_host(np.random.default_rng(3).standard_normal((2, 3, 6, 6)).astype(np.float32), data)
            net.forward()
            if phase == caffe_pb2.TRAIN:
                net.backward()
                found.append(net.layers[1].blobs[0].host_diff())
            found.append(net.blobs["loss"].host_data())
    assert all(found[0].ravel()) or phase == caffe_pb2.TEST
    for one, other in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
