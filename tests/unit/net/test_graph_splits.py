"""Automatic Split layers: names, order and loss weights are those of Caffe's `insert_splits.cpp`."""

from __future__ import annotations

import re

import numpy as np
import pytest
from training import CPU, build_net

from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.graph import insert_splits


def split(text: str) -> list[caffe_pb2.LayerParameter]:
    return list(insert_splits(parse_text(text, caffe_pb2.NetParameter(), "net")).layer)


DATA = 'layer { name: "data" type: "Input" top: "data" top: "label" }\n'


def test_a_top_used_once_is_left_alone() -> None:
    layers = split(DATA + 'layer { name: "a" type: "ReLU" bottom: "data" top: "a" }')
    assert [layer.name for layer in layers] == ["data", "a"]


def test_a_top_used_twice_is_split_right_after_its_layer() -> None:
    layers = split(
        DATA
        + 'layer { name: "a" type: "ReLU" bottom: "data" top: "a" }'
        + 'layer { name: "b" type: "Concat" bottom: "data" bottom: "label" top: "b" }'
    )
    assert [layer.name for layer in layers] == ["data", "data_data_0_split", "a", "b"]
    assert layers[1].type == "Split"
    assert list(layers[1].bottom) == ["data"]
    assert list(layers[1].top) == ["data_data_0_split_0", "data_data_0_split_1"]
    assert list(layers[2].bottom) == ["data_data_0_split_0"]
    assert list(layers[3].bottom) == ["data_data_0_split_1", "label"]


def test_the_index_is_that_of_the_top() -> None:
    layers = split(DATA + 'layer { name: "a" type: "Eltwise" bottom: "label" bottom: "label" top: "a" }')
    assert layers[1].name == "label_data_1_split"
    assert list(layers[2].bottom) == ["label_data_1_split_0", "label_data_1_split_1"]


def test_in_place_layers_make_a_new_top_of_the_same_name() -> None:
    layers = split(
        DATA
        + 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" }'
        + 'layer { name: "relu" type: "ReLU" bottom: "ip" top: "ip" }'
        + 'layer { name: "a" type: "ReLU" bottom: "ip" top: "a" }'
        + 'layer { name: "b" type: "ReLU" bottom: "ip" top: "b" }'
    )
    assert [layer.name for layer in layers] == ["data", "ip", "relu", "ip_relu_0_split", "a", "b"]
    assert list(layers[2].bottom) == ["ip"]


def test_a_loss_weight_is_a_use_and_moves_to_the_first_top() -> None:
    layers = split(
        DATA
        + 'layer { name: "a" type: "ReLU" bottom: "data" top: "a" loss_weight: 2 }'
        + 'layer { name: "b" type: "ReLU" bottom: "a" top: "b" }'
    )
    assert [layer.name for layer in layers] == ["data", "a", "a_a_0_split", "b"]
    assert list(layers[1].loss_weight) == [0], "a loss layer would take nothing for 1"
    assert list(layers[2].loss_weight) == [2, 0]
    assert list(layers[3].bottom) == ["a_a_0_split_1"]


def test_a_loss_weight_of_zero_is_none() -> None:
    layers = split(
        DATA
        + 'layer { name: "a" type: "ReLU" bottom: "data" top: "a" loss_weight: 0 }'
        + 'layer { name: "b" type: "ReLU" bottom: "a" top: "b" }'
    )
    assert [layer.name for layer in layers] == ["data", "a", "b"]


def test_an_unknown_bottom_names_layer_and_nearest_blob() -> None:
    text = DATA + 'layer { name: "a" type: "ReLU" bottom: "dat" top: "a" }'
    with pytest.raises(ConfigError, match=r"layer 'a' \(ReLU\): unknown bottom blob 'dat' .*did you mean 'data'\?"):
        split(text)


def test_a_bottom_may_not_come_later() -> None:
    with pytest.raises(ConfigError, match="no layer before it produces any"):
        split('layer { name: "a" type: "ReLU" bottom: "x" top: "a" }' + DATA)


def test_a_bottom_whose_layer_the_phase_leaves_out_names_the_phase() -> None:
    with pytest.raises(ConfigError, match=r"no layer before it produces any in phase TEST; a layer with include"):
        split('state { phase: TEST } layer { name: "a" type: "ReLU" bottom: "x" top: "a" }')


def test_the_net_given_is_not_changed() -> None:
    text = DATA + 'layer { name: "a" type: "Eltwise" bottom: "data" bottom: "data" top: "a" }'
    param = parse_text(text, caffe_pb2.NetParameter(), "net")
    before = param.SerializeToString()
    insert_splits(param)
    assert param.SerializeToString() == before


# -- messages -----------------------------------------------------------------------------------------------

SHARED = """
layer { name: "data" type: "Input" top: "x" top: "y" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "more" type: "Silence" bottom: "x" bottom: "y" bottom: "ip" }
"""


@pytest.mark.parametrize(
    "reader",
    [
        'type: "SoftmaxWithLoss" bottom: "ip" bottom: "y" top: "l"',
        'type: "Accuracy" bottom: "ip" bottom: "y" top: "l"',
        'type: "MultinomialLogisticLoss" bottom: "ip" bottom: "y" top: "l"',
        'type: "HingeLoss" bottom: "ip" bottom: "y" top: "l"',
        'type: "CenterLoss" bottom: "ip" bottom: "y" top: "l" center_loss_param { num_output: 3 }',
        'type: "Embed" bottom: "y" top: "l" embed_param { input_dim: 3 num_output: 2 }',
        'type: "BatchReindex" bottom: "x" bottom: "y" top: "l"',
    ],
)
def test_bad_data_are_of_the_blob_that_the_prototxt_names(reader: str) -> None:
    net = build_net(f'{SHARED} layer {{ name: "l" {reader} }}')
    CPU.from_host(np.array([0, 7], np.float32), net.blobs["y"].data)
    with pytest.raises(DataError, match="layer 'l' .*'(ip|y)'") as caught:
        net.forward()
        net.raise_device_errors()
    assert "_split_" not in str(caught.value)


def test_shapes_are_of_the_blob_that_the_prototxt_names() -> None:
    with pytest.raises(ShapeError, match=r"layer 'l' \(EuclideanLoss\): .*'x' is 2 3 \(6\).*'y' is 2 \(2\)"):
        build_net(f'{SHARED} layer {{ name: "l" type: "EuclideanLoss" bottom: "x" bottom: "y" top: "l" }}')


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16"])
def test_layers_know_the_names_that_the_prototxt_gives_their_bottoms(kind: str) -> None:
    """Behind Split and Cast layers too."""
    text = f"""default_forward_type: {kind} default_backward_type: {kind} {SHARED}
    layer {{ name: "sum" type: "Eltwise" bottom: "ip" bottom: "x" top: "sum" }}
    layer {{ name: "l" type: "SoftmaxWithLoss" bottom: "ip" bottom: "y" top: "l" }}"""
    net = Net(parse_text(text, caffe_pb2.NetParameter(), "net"), LayerContext(MetaBackend()))
    written = {
        found["name"]: re.findall('bottom: "(.*?)"', found[0])
        for found in re.finditer('layer { name: "(?P<name>.*?)".*', text)
    }
    found = {layer.name: layer.bottom_names for layer in net.layers if layer.type not in ("Split", "Cast")}
    assert found == written
