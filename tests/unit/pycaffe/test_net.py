"""`caffe.Net`: its parts by name, partial passes, inputs and outputs, callbacks, files."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy import pycaffe as caffe
from caffepy.errors import ConfigError, SnapshotError


@pytest.fixture
def net(net_file: Path) -> caffe.Net:
    caffe.set_random_seed(3)
    net = caffe.Net(str(net_file), caffe.TRAIN)
    net.blobs["label"].data[...] = np.arange(5)
    net.blobs["data"].data[...] = np.random.default_rng(1).normal(size=(5, 2, 3, 4))
    return net


def test_what_it_is_made_of(net: caffe.Net) -> None:
    assert list(net.blobs) == ["data", "label", "conv", "ip_blob", "loss"]
    assert net._layer_names == ["data", "label", "conv", "relu", "ip", "loss"]
    assert [layer.type for layer in net.layers] == [
        "Input",
        "Input",
        "Convolution",
        "ReLU",
        "InnerProduct",
        "SoftmaxWithLoss",
    ]
    assert list(net.params) == ["conv", "ip"] and [blob.shape for blob in net.params["conv"]] == [(11, 2, 2, 2), (11,)]
    assert net.layer_dict["ip"] is net.layers[4] and net.layer_dict["ip"].blobs is net.params["ip"]
    assert (net.inputs, net.outputs) == (["data", "label"], ["loss"])
    assert net.blob_loss_weights == OrderedDict(data=0, label=0, conv=0, ip_blob=0, loss=1)
    assert net.top_names["relu"] == net.bottom_names["relu"] == ["conv"]
    assert net.bottom_names["loss"] == ["ip_blob", "label"] and net.bottom_names["data"] == []
    assert (net._inputs, net._outputs, net._top_ids(4), net._bottom_ids(5)) == ([0, 1], [4], [3], [3, 1])
    assert net._blob_names == list(net.blobs) and net._blobs == list(net.blobs.values())
    assert net._blob_loss_weights == [0, 0, 0, 0, 1] and net.name == "small"
    assert repr(net) == "<caffe.Net 'small' (TRAIN, 6 layers, cpu)>"


def test_splits_and_unnamed_tops_are_among_the_blobs(write) -> None:
    path = write(
        "split.prototxt",
        "layer { name: 'x' type: 'Input' top: 'x' input_param { shape { dim: 2 dim: 3 } } }"
        "layer { name: 'a' type: 'ReLU' bottom: 'x' top: 'a' } layer { name: 'b' type: 'ReLU' bottom: 'x' top: 'b' }"
        "layer { name: 'l' type: 'EuclideanLoss' bottom: 'a' bottom: 'b' }",
    )
    net = caffe.Net(path, caffe.TEST)
    assert list(net.blobs) == ["x", "x_x_0_split_0", "x_x_0_split_1", "a", "b", "(automatic)"]
    net.blobs["x"].data[...] = -1
    net.forward()
    assert (net.blobs["x_x_0_split_1"].data == -1).all() and net.outputs == []


def test_phase_level_and_stages(write) -> None:
    layer = "layer {{ name: '{0}' type: 'Input' top: '{0}' input_param {{ shape {{ dim: 1 }} }} include {{ {1} }} }}"
    rules = {"test": "phase: TEST", "high": "min_level: 2", "staged": "stage: 'a'", "any": "min_level: 0"}
    path = write("rules.prototxt", "".join(layer.format(*pair) for pair in rules.items()))
    assert list(caffe.Net(path, caffe.TRAIN).blobs) == ["any"]
    assert list(caffe.Net(path, caffe.TEST, level=2, stages=["a"]).blobs) == ["test", "high", "staged", "any"]
    assert list(caffe.Net(path, caffe.TRAIN, 2, ["a"], None).blobs) == ["high", "staged", "any"]
    assert list(caffe.Net(network_file=path, phase=caffe.TEST, level=1).blobs) == ["test", "any"]


def test_both_constructors_take_weights(net: caffe.Net, net_file: Path, tmp_path: Path, caplog) -> None:
    weights = str(tmp_path / "w.caffemodel")
    net.save(weights)
    old, new = caffe.Net(str(net_file), weights, caffe.TEST), caffe.Net(net_file, caffe.TEST, weights=weights)
    assert "Use this instead" in caplog.text
    fifth = caffe.Net(net_file, caffe.TEST, 0, None, weights)
    for name in net.params:
        for index, blob in enumerate(net.params[name]):
            for other in (old, new, fifth):
                assert (other.params[name][index].data == blob.data).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("absent.prototxt", 0), RuntimeError, r"Could not open file absent\.prototxt: No such file"),
        (("NET", 0, 0, None, "absent.caffemodel"), RuntimeError, r"Could not open file absent\.caffemodel"),
        (("NET",), RuntimeError, "Net needs a phase, caffe.TRAIN or caffe.TEST, not None"),
        (("NET", 2), ConfigError, "Net needs a phase, .* not 2"),
    ],
)
def test_what_cannot_be_made(net_file: Path, arguments: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        caffe.Net(*(str(net_file) if a == "NET" else a for a in arguments))


def test_forward_and_backward_agree_with_numbers(net: caffe.Net) -> None:
    out = net.forward()
    scores = net.blobs["ip_blob"].data
    shifted = scores - scores.max(1, keepdims=True)
    probability = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    np.testing.assert_allclose(out["loss"], -np.log(probability[range(5), range(5)]).mean(), rtol=1e-5)
    assert net._forward(0, 5) == pytest.approx(float(out["loss"]))
    diffs = net.backward(diffs=["ip_blob"])
    wanted = (probability - np.eye(5, 13)) / 5
    np.testing.assert_allclose(diffs["ip_blob"], wanted, atol=1e-6)
    np.testing.assert_allclose(net.params["ip"][1].diff, wanted.sum(0), atol=1e-6)
    assert diffs["data"].shape == (5, 2, 3, 4) and diffs["data"].any()


def test_partial_passes(net: caffe.Net) -> None:
    whole = float(net.forward()["loss"])
    assert set(net.forward(end="conv")) == {"conv"} and (net.blobs["conv"].data < 0).any()  # before the in-place ReLU
    assert set(net.forward(["data"], start="relu", end="ip")) == {"ip_blob", "data"}
    assert float(net.forward(start="loss")["loss"]) == whole
    net.blobs["ip_blob"].data[...] = 0
    np.testing.assert_allclose(net.forward(start="loss")["loss"], np.log(13), rtol=1e-6)
    net.blobs["ip_blob"].diff[...] = given_diff = np.random.default_rng(0).normal(size=(5, 13)).astype(np.float32)
    found = net.backward(start="ip", end="ip")
    weights = net.params["ip"][0].data
    np.testing.assert_allclose(found["conv"].reshape(5, -1), given_diff @ weights, rtol=1e-4, atol=1e-5)


def test_a_loss_takes_the_diff_that_the_program_writes(net: caffe.Net) -> None:
    net.forward()
    once = net.backward()["data"].copy()
    net.blobs["loss"].diff[...] = 3
    np.testing.assert_allclose(net.backward()["data"], 3 * once, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(net.backward(loss=np.float32(0.5))["data"], once / 2, rtol=1e-4, atol=1e-6)


def test_parameter_diffs_add_up_until_they_are_cleared(net: caffe.Net) -> None:
    held = net.params["conv"][0].diff
    net.forward()
    net.backward()
    once = held.copy()
    net.backward()
    np.testing.assert_allclose(held, 2 * once, rtol=1e-5)
    net.clear_param_diffs()
    assert not held.any()
    held += 1
    net.backward()
    np.testing.assert_allclose(held, once + 1, rtol=1e-5)


def test_keywords_fill_inputs_and_top_diffs(net: caffe.Net) -> None:
    rows = np.ones((5, 2, 3, 4))
    out = net.forward(blobs=["data"], data=rows, label=np.zeros(5))
    assert (out["data"] == 1).all() and not net.blobs["label"].data.any()
    for call, message in [
        (
            lambda: net.forward(data=rows),
            "Input blob arguments do not match net inputs: data are given for data, label",
        ),
        (lambda: net.backward(data=rows), "Top diff arguments do not match net outputs: data are given for loss"),
        (
            lambda: net.forward(data=rows[:4], label=np.zeros(5)),
            r"Input is not batch sized: 'data' is given in shape \(4",
        ),
        (lambda: net.forward(start="cnv"), "no layer 'cnv'; did you mean 'conv'"),
        (lambda: net.forward(blobs=["ip_blo"]), "no blob 'ip_blo'; did you mean 'ip_blob'"),
        (lambda: net.forward(start="loss", end="ip"), "layers 5 to 4 of a net with 6 layers: not in that order"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize("rows", [1, 5, 7, 10])
def test_all_rows_are_run_in_batches(net: caffe.Net, rows: int) -> None:
    random = np.random.default_rng(rows)
    data, label = random.normal(size=(rows, 2, 3, 4)).astype(np.float32), random.integers(0, 13, rows).astype(float)
    out = net.forward_all(blobs=["ip_blob"], data=data, label=label)
    assert out["ip_blob"].shape == (rows, 13) and out["loss"].shape == (-(-rows // 5),)
    outs, diffs = net.forward_backward_all(blobs=["ip_blob"], diffs=["ip_blob"], data=data, label=label)
    assert diffs["data"].shape == data.shape and diffs["ip_blob"].shape == (rows, 13)
    np.testing.assert_array_equal(out["ip_blob"], outs["ip_blob"])
    net.blobs["data"].reshape(rows, 2, 3, 4)
    net.blobs["label"].reshape(rows)
    alone = net.forward(blobs=["ip_blob"], data=data, label=label)
    np.testing.assert_allclose(alone["ip_blob"], out["ip_blob"], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="give the rows of the net's inputs as keywords"):
        net.forward_all()
    with pytest.raises(ConfigError, match="'data' has no rows; give at least one"):
        net.forward_all(data=data[:0], label=label[:0])


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_reshape(tmp_path_factory, count: int, height: int, width: int) -> None:
    path = tmp_path_factory.mktemp("net") / "conv.prototxt"
    path.write_text(
        "input: 'data' input_dim: 1 input_dim: 1 input_dim: 2 input_dim: 2 layer { name: 'c' type: 'Convolution' "
        "bottom: 'data' top: 'c' convolution_param { num_output: 2 kernel_size: 1 weight_filler { value: 2 type: 'constant' } } }"  # noqa: E501
    )
    net = caffe.Net(path, caffe.TEST)
    net.blobs["data"].reshape(count, 1, height, width)
    net.reshape()
    assert net.blobs["c"].shape == (count, 2, height, width)
    net.blobs["data"].data[...] = 3
    assert (net.forward()["c"] == 6).all()
    net.blobs["c"].reshape(1)  # the layer gives its top the shape that it needs
    assert net.forward()["c"].shape == (count, 2, height, width)


def test_callbacks_get_the_layers_number_and_may_change_numbers(net: caffe.Net) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(net, name)(lambda layer, name=name: calls.append((name, layer)))
    net.forward(start="relu", end="ip")
    net.backward(start="loss", end="ip")
    expected = [("before_forward", 3), ("after_forward", 3), ("before_forward", 4), ("after_forward", 4)]
    expected += [("before_backward", 5), ("after_backward", 5), ("before_backward", 4), ("after_backward", 4)]
    assert calls == expected
    held = net.blobs["conv"].data
    seen = []

    def double(layer: int) -> None:
        if net._layer_names[layer] == "relu":
            seen.append(held.copy())
            held[...] = 0

    net.after_forward(double)
    net.forward()
    assert seen[0].any() and (net.blobs["ip_blob"].data == -3).all()


def test_an_exchange_object_is_called_after_each_backward_layer(net: caffe.Net) -> None:
    class Exchange:
        def __init__(self) -> None:
            self.layers: list[int] = []

        def run(self, layer: int) -> None:
            self.layers.append(layer)

    exchange = Exchange()
    net.after_backward(exchange)
    net.forward()
    net.backward()
    assert exchange.layers == [5, 4, 3, 2, 1, 0]


def test_what_a_callback_raises_comes_out(net: caffe.Net) -> None:
    def fail(layer: int) -> None:
        raise KeyError("mine")

    net.before_forward(fail)
    with pytest.raises(KeyError, match="mine"):
        net.forward()


def test_files(net: caffe.Net, net_file: Path, tmp_path: Path) -> None:
    net.params["ip"][1].data[...] = 0.25
    net.save(tmp_path / "w.caffemodel")
    net.save_hdf5(str(tmp_path / "w.h5"))
    assert caffe.proto.caffe_pb2.NetParameter.FromString((tmp_path / "w.caffemodel").read_bytes()).name == "small"
    for load, name in [("copy_from", "w.caffemodel"), ("copy_from", "w.h5"), ("load_hdf5", "w.h5")]:
        other = caffe.Net(net_file, caffe.TEST)
        held = other.params["ip"][0].data
        getattr(other, load)(str(tmp_path / name))
        assert (held == net.params["ip"][0].data).all() and (other.params["ip"][1].data == 0.25).all()
    with pytest.raises(SnapshotError, match="absent"):
        net.copy_from(str(tmp_path / "absent.caffemodel"))


def test_nets_share_parameters(net: caffe.Net, net_file: Path) -> None:
    other = caffe.Net(net_file, caffe.TEST)
    other.share_with(net)
    net.params["ip"][1].data[...] = 7
    other.forward(data=net.blobs["data"].data, label=np.arange(5))
    assert (other.params["ip"][1].data == 7).all() and (
        other.params["conv"][0].data == net.params["conv"][0].data
    ).all()
    net.forward()
    np.testing.assert_array_equal(other.blobs["ip_blob"].data, net.blobs["ip_blob"].data)
    other.params["conv"][0].data[...] = 0
    assert not net.params["conv"][0].data.any()


def test_arrays_outlive_the_net(net: caffe.Net) -> None:
    arrays = [blob.data for blob in net.blobs.values()] + [b.diff for bs in net.params.values() for b in bs]
    blobs = list(net.blobs.values())
    before = [array.copy() for array in arrays]
    del net
    gc.collect()
    for array, then in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, then)
    assert blobs[0].data.shape == (5, 2, 3, 4) and (blobs[1].data == np.arange(5)).all()


def test_memory_data(write) -> None:
    path = write(
        "memory.prototxt",
        "layer { name: 'm' type: 'MemoryData' top: 'data' top: 'label' "
        "memory_data_param { batch_size: 2 channels: 1 height: 1 width: 3 } }",
    )
    net = caffe.Net(path, caffe.TEST)
    rows = np.arange(12, dtype=np.float32).reshape(4, 1, 1, 3)
    net.set_input_arrays(rows, np.arange(4, dtype=np.float32))
    assert net.blobs["label"].shape == (2,)
    assert [net.forward()["label"].ravel().tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    net.reshape()
    assert net.blobs["label"].data.shape == (2, 1, 1, 1)
    assert (net.blobs["data"].data == rows[:2]).all()
    with pytest.raises(RuntimeError, match="data array must be C contiguous, 4-d and float32; it is float64"):
        net.set_input_arrays(rows.astype(float), np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match="labels array must be C contiguous"):
        net.set_input_arrays(rows, np.zeros((4, 1), np.float32))
    for wrong, count, message in (
        (rows.reshape(4, 1, 3, 1), 4, "data of shape"),
        (rows, 3, "4 rows of data and 3 labels"),
        (rows[:3], 3, "a multiple of the batch size 2"),
    ):
        with pytest.raises(RuntimeError, match=message):
            net.set_input_arrays(wrong, np.zeros(count, np.float32))


def test_unknown_names_are_pythons_errors(net: caffe.Net) -> None:
    for call in (lambda: net.forward(blobs=["nope"]), lambda: net.backward(diffs=["nope"])):
        with pytest.raises(KeyError, match="^the net has no blob 'nope'"):
            call()
    for call in (lambda: net.forward(start="nope"), lambda: net.backward(end="nope")):
        with pytest.raises(ValueError, match="^the net has no layer 'nope'"):
            call()


def test_only_a_memory_data_layer_takes_arrays(net: caffe.Net) -> None:
    with pytest.raises(RuntimeError, match="may only be called if the first layer is a MemoryDataLayer"):
        net.set_input_arrays(np.zeros((1, 1, 1, 1), np.float32), np.zeros(1, np.float32))


def test_the_seed_decides_the_weights(net_file: Path) -> None:
    def weights() -> np.ndarray:
        return caffe.Net(net_file, caffe.TEST).params["ip"][0].data.copy()

    caffe.set_random_seed(5)
    first, second = weights(), weights()
    caffe.set_random_seed(5)
    assert (first == weights()).all() and (second == weights()).all() and (first != second).any()


def look_at_diff(net: caffe.Net) -> None:
    _ = net.params["conv"][0].diff


PHASES = {"TRAIN": caffe.TRAIN, "TEST": caffe.TEST}
BETWEEN: dict[str, Callable[[caffe.Net], Any]] = {
    "nothing": lambda net: None,
    "clear_param_diffs": lambda net: net.clear_param_diffs(),
    "a look at a diff": look_at_diff,
    "backward": lambda net: net.backward(),
    "reshape": lambda net: net.reshape(),
    "a look at the net": lambda net: net.net,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("param", ["", "param { name: 'b' share_mode: PERMISSIVE } "])
def test_an_array_of_a_parameter_stays_the_parameter(write, phase: str, between: str, param: str) -> None:
    """Before the first pass and after it, whatever the program does with the net."""
    text = f"""
    force_backward: true
    layer {{ name: 'x' type: 'Input' top: 'x' input_param {{ shape {{ dim: 1 dim: 4 }} }} }}
    layer {{ name: 'conv' type: 'Scale' bottom: 'x' top: 'y' }}
    layer {{ name: 'ip' type: 'InnerProduct' bottom: 'y' top: 'ip' param {{ }} {param}
      inner_product_param {{ num_output: 4 }} }}
    layer {{ name: 'bias' type: 'Parameter' top: 'bias' {param} parameter_param {{ shape {{ dim: 2 dim: 2 }} }} }}
    """
    net = caffe.Net(write("net.prototxt", text), PHASES[phase])
    held = net.params["ip"][1].data
    for i in range(1, 5):
        held[...] = i
        assert (net.forward()["ip"] == i).all()
        BETWEEN[between](net)
        assert (held == i).all() and (net.params["ip"][1].data == i).all()
        held[...] = -i
        assert (net.forward()["ip"] == -i).all()


def test_an_array_of_a_diff_stays_the_parameters(net: caffe.Net) -> None:
    held = net.params["ip"][0].diff
    for _ in range(2):
        net.forward()
        net.backward()
        assert held.any() and (held == net.params["ip"][0].diff).all()
        net.clear_param_diffs()
        assert not held.any()
