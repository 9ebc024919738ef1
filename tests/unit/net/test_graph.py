"""Who reads what, and which layers run backward (Caffe's `test_net.cpp` has the same questions)."""

from __future__ import annotations

import pytest
from training import build_net

from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net

DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } data_filler { type: "gaussian" }
    data_filler { type: "constant" value: 1 } } }
"""


def inner(name: str, bottom: str, extra: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {extra} '
        'inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }\n'
    )


def loss(bottom: str, name: str = "loss", extra: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "SoftmaxWithLoss" bottom: "{bottom}" bottom: "label" top: "{name}" {extra} }}\n'
    )


def backward_layers(net: Net) -> list[str]:
    return [node.layer.name for node in net.nodes if node.need_backward]


def test_layers_between_a_parameter_and_the_loss_run_backward() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a") + loss("b"))
    assert backward_layers(net) == ["a", "b", "loss"]
    assert [node.propagate_down for node in net.nodes] == [[], [False], [True], [True, False]]


def test_a_branch_without_loss_does_not() -> None:
    text = DATA + inner("a", "data") + inner("b", "a") + inner("side", "a") + loss("b")
    net = build_net(text)
    assert backward_layers(net) == ["a", "a_a_0_split", "b", "loss"]
    assert sorted(net.outputs) == ["loss", "side"]


def test_a_frozen_beginning_does_not() -> None:
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    net = build_net(DATA + inner("a", "data", frozen) + inner("b", "a") + loss("b"))
    assert backward_layers(net) == ["b", "loss"]
    assert net.nodes[2].propagate_down == [False]


def test_a_frozen_layer_in_the_middle_passes_gradients_on() -> None:
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    net = build_net(DATA + inner("a", "data") + inner("b", "a", frozen) + loss("b"))
    assert backward_layers(net) == ["a", "b", "loss"]
    assert net.layers[2].propagate_to_params == [False, False]


def test_propagate_down_false_ends_the_gradient() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a", "propagate_down: false") + loss("b"))
    assert backward_layers(net) == ["b", "loss"]


@pytest.mark.parametrize("phase", [caffe_pb2.TRAIN, caffe_pb2.TEST])
@pytest.mark.parametrize("layer", ["ArgMax", "Threshold"])
def test_layers_without_a_backward_pass_are_passed_over(layer: str, phase: int) -> None:
    stop = f'layer {{ name: "stop" type: "{layer}" bottom: "a" top: "stop" propagate_down: false }}\n'
    net = build_net(DATA + inner("a", "data") + stop + inner("b", "stop") + loss("b"), phase)
    net.forward()
    net.backward()
    assert backward_layers(net) == ["b", "loss"]


def test_propagate_down_where_nothing_is_learned() -> None:
    net = build_net(DATA + inner("a", "data", "propagate_down: true") + loss("a"))
    assert net.nodes[1].propagate_down == [True]


def test_propagate_down_must_be_given_for_every_bottom() -> None:
    with pytest.raises(ConfigError, match="layer 'loss'.*propagate_down must be given .* 2 bottoms, is given 1 times"):
        build_net(DATA + inner("a", "data") + loss("a", extra="propagate_down: true"))


def test_force_backward_gives_the_data_a_gradient_but_not_the_label() -> None:
    net = build_net("force_backward: true" + DATA + inner("a", "data") + loss("a"))
    assert net.nodes[1].propagate_down == [True]
    assert net.nodes[2].propagate_down == [True, False]
    net.forward()
    net.backward()
    assert abs(net.blobs["data"].host_diff()).sum() > 0


def test_a_label_that_depends_on_parameters_is_refused() -> None:
    text = DATA + inner("a", "data") + inner("b", "data").replace("num_output: 2", "num_output: 1")
    text += 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "a" bottom: "b" top: "loss" }'
    with pytest.raises(ConfigError, match="layer 'loss'.*cannot backpropagate to its bottom 'b'"):
        build_net(text)


def test_a_loss_weight_of_zero_ends_training() -> None:
    net = build_net(DATA + inner("a", "data") + loss("a", extra="loss_weight: 0"))
    assert backward_layers(net) == []


def test_in_place_layers_share_one_blob() -> None:
    text = DATA + inner("a", "data") + 'layer { name: "relu" type: "ReLU" bottom: "a" top: "a" }' + loss("a")
    net = build_net(text)
    assert net.tops[1][0] is net.tops[2][0] is net.bottoms[3][0] is net.blobs["a"]


def test_outputs_are_in_the_order_of_their_names() -> None:
    text = DATA + inner("z", "data") + inner("Y", "data") + inner("x", "data")
    assert list(build_net(text).outputs) == ["Y", "label", "x", "z"]


def test_a_loss_needs_no_top() -> None:
    text = DATA + inner("a", "data") + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "a" bottom: "label" }'
    net = build_net(text)
    net.forward()
    assert net.loss() > 0
    assert list(net.outputs) == []


@pytest.mark.parametrize(
    ("kind", "field", "problem"),
    [
        ("ImageData", "image_data_param", "image list 'absent' cannot be read"),
        ("HDF5Data", "hdf5_data_param", "HDF5 list 'absent' cannot be read"),
        ("WindowData", "window_data_param", "window file 'absent' cannot be read"),
    ],
)
def test_data_that_are_absent_are_named_with_their_layer(kind: str, field: str, problem: str) -> None:
    layer = f'name: "d" type: "{kind}" top: "data" top: "label" {field} {{ source: "absent" batch_size: 2 }}'
    with pytest.raises(DataError, match=rf"^layer 'd' .{kind}.: {problem}"):
        build_net(f"layer {{ {layer} {'transform_param { crop_size: 4 }' * (kind == 'WindowData')} }}")


def test_phases() -> None:
    text = DATA + inner("a", "data") + inner("t", "data", "include { phase: TEST }")
    assert build_net(text).layer_names == ["data", "a"]
    assert "t" in build_net(text, caffe_pb2.TEST).layer_names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layer { name: "a" type: "Relu" bottom: "data" top: "a" }', "layer 'a': unknown layer type 'Relu'.*'ReLU'"),
        ('layer { name: "a" type: "ReLU" bottom: "dta" top: "a" }', "layer 'a'.*unknown bottom blob 'dta'.*'data'"),
        ('layer { name: "a" type: "ReLU" bottom: "data" top: "label" }', "layer 'a'.*'label' is already produced"),
        (
            inner("a", "data") + inner("b", "a") + 'layer { name: "r" type: "ReLU" bottom: "a" top: "a" }',
            "^layer 'r' .ReLU.: works in place on 'a', which another layer before it reads, .*; give its top another",
        ),
        ('layer { name: "a" type: "ReLU" top: "a" }', "layer 'a' .ReLU.: takes 1 bottom blob, has 0"),
        (
            'layer { name: "a" type: "ReLU" bottom: "data" top: "a" top: "b" }',
            "layer 'a' .ReLU.: takes 1 top blob, has 2",
        ),
        ('layer { name: "a" type: "Concat" top: "a" }', "takes at least 1 bottom blobs, has 0"),
        ('layer { name: "a" type: "Split" top: "a" }', "takes 1 bottom blob, has 0"),
        ('layer { name: "a" type: "ReLU" bottom: "data" top: "a" param { } }', "too many params: 1 are specified"),
        (
            'layer { name: "a" type: "ReLU" bottom: "data" top: "a" loss_weight: 1 loss_weight: 1 }',
            "loss_weight must be given .* 1 tops, is given 2 times",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_net(DATA + text)
