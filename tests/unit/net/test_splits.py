"""Automatic Split layers: names, order and loss weights are those of Caffe's `insert_splits.cpp`."""

from __future__ import annotations

import pytest

from caffepy.config.text import parse_text
from caffepy.errors import ConfigError
from caffepy.net.splits import insert_splits
from caffepy.proto import caffe_pb2


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
