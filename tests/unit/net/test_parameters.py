"""Flat buffers and shared parameters."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from training import CPU, build_net, weights_of

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import BlobShape, NetParameter, Phase
from caffepy.net import ParameterBuffer
from caffepy.net.parameters import ALIGNMENT, bucket_count

DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 dim: 3 } data_filler { type: "gaussian" std: 1 } } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "b" bottom: "label" top: "loss" }'


def inner(name: str, bottom: str, params: str = "", outputs: int = 3) -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {params} inner_product_param '
        f'{{ num_output: {outputs} weight_filler {{ type: "xavier" }} '
        'bias_filler { type: "constant" value: 1 } } }\n'
    )


def test_the_last_layer_comes_first_and_starts_are_aligned() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    before = weights_of(net)
    buffer = net.parameters
    places = {(p.layer.name, p.index): (p.start, p.stop) for p in buffer.parameters}
    assert places == {("b", 0): (0, 9), ("b", 1): (64, 67), ("a", 0): (128, 137), ("a", 1): (192, 195)}
    assert all(p.start % ALIGNMENT == 0 for p in buffer.parameters)
    assert [(p.layer.name, p.index) for p in buffer.parameters] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (buffer.learned, buffer.size) == (256, 256 + ParameterBuffer.FLAGS)
    assert buffer.diff.shape == (buffer.size,)
    for name, values in weights_of(net).items():
        np.testing.assert_array_equal(values, before[name])


def test_blobs_are_views_of_the_buffers() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    net.forward()
    net.backward()
    buffer = net.parameters
    for parameter in buffer.parameters:
        np.testing.assert_array_equal(CPU.to_host(buffer.view(buffer.diff, parameter)), parameter.blob.host_diff())
        assert np.abs(parameter.blob.host_diff()).sum() > 0
    CPU.fill(buffer.data, 7.0)
    assert (net.layers[1].blobs[0].host_data() == 7).all()
    assert not CPU.to_host(buffer.flags).any()


def test_copies_of_single_parameters_stay_where_they_are() -> None:
    """Graphs know their addresses, also once all parameters have copies."""
    net = build_net(DATA + inner("a", "data", outputs=2) + inner("b", "a") + LOSS)
    buffer, (first, second) = net.parameters, [layer.blobs[0] for layer in net.layers if layer.blobs]
    buffer.refresh_single([(first, "float16")])
    copy = first.copies["float16"]
    assert not buffer.copies and not second.copies
    first.data[...], second.data[...] = 3, 4
    buffer.refresh(["float16"])
    assert first.copies["float16"] is copy and (copy == 3).all()
    assert (second.copies["float16"] == 4).all()
    first.data[...], second.data[...] = 5, 6
    buffer.refresh_single([(first, "float16"), (second, "float16")])
    assert (copy == 5).all() and (second.copies["float16"] == 6).all()


def test_gradients_may_lie_in_memory_of_somebody_elses() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    memory = np.zeros(net.parameters.size + 7, np.float32)[7:]
    net.parameters.bind_gradients(memory)
    net.clear_param_diffs()
    net.forward()
    net.backward()
    assert net.parameters.diff is memory and memory[:9].any()
    assert all(np.shares_memory(p.blob.diff, memory) for p in net.parameters.parameters)


def test_gradients_accumulate_until_they_are_cleared() -> None:
    net = build_net(DATA.replace("gaussian", "constant") + inner("a", "data") + inner("b", "a") + LOSS)
    for _ in range(2):
        net.forward()
        net.backward()
    twice = CPU.to_host(net.parameters.diff)
    net.clear_param_diffs()
    net.forward()
    net.backward()
    np.testing.assert_allclose(CPU.to_host(net.parameters.diff) * 2, twice, rtol=1e-6)


def test_the_callback_comes_when_a_layers_gradients_are_final() -> None:
    net = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    seen: list[int] = []
    net.after_backward.append(lambda node: seen.append(net.schedule.index(node)))
    net.forward()
    net.backward()
    assert seen == [3, 2, 1, 0]


SHARED = 'param { name: "w" } param { name: "c" }'


def test_shared_parameters_are_one_and_add_up_their_gradients() -> None:
    text = DATA + inner("a", "data", SHARED) + inner("b", "a", SHARED) + LOSS
    net = build_net(text)
    a, b = net.layers[1], net.layers[2]
    CPU.fill(a.blobs[0].data, 0.5)
    assert (b.blobs[0].host_data() == 0.5).all()
    assert [p.blob for p in net.parameters.parameters] == a.blobs
    separate = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    for layer in separate.layers[1:3]:
        for mine, theirs in zip(layer.blobs, a.blobs, strict=True):
            CPU.copy(theirs.data, mine.data)
    for n in (net, separate):
        n.forward()
        n.backward()
    for i in range(2):
        total = separate.layers[1].blobs[i].host_diff() + separate.layers[2].blobs[i].host_diff()
        np.testing.assert_allclose(a.blobs[i].host_diff(), total, rtol=1e-5, atol=1e-6)


def test_permissive_sharing_across_shapes() -> None:
    permissive = 'param { name: "w" share_mode: PERMISSIVE }'
    text = DATA + inner("a", "data", permissive, 2) + inner("wide", "a", permissive, 3)
    net = build_net(text + 'layer { name: "sum" type: "Split" bottom: "wide" top: "sum" loss_weight: 1 }')
    net.forward()
    net.backward()
    a, wide = net.layers[1], net.layers[2]
    assert (a.blobs[0].shape, wide.blobs[0].shape) == ((2, 3), (3, 2))
    np.testing.assert_array_equal(a.blobs[0].host_data().ravel(), wide.blobs[0].host_data().ravel())
    np.testing.assert_array_equal(a.blobs[0].host_diff().ravel(), wide.blobs[0].host_diff().ravel())
    x, w = net.blobs["data"].host_data(), a.blobs[0].host_data()
    hidden = x @ w.T + 1
    through = np.ones((4, 3)) @ wide.blobs[0].host_data()
    wanted = (through.T @ x).ravel() + (np.ones((3, 4)) @ hidden).ravel()
    np.testing.assert_allclose(a.blobs[0].host_diff().ravel(), wanted, rtol=1e-4, atol=1e-5)


PERMISSIVE = 'param { name: "w" share_mode: PERMISSIVE }'


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
@pytest.mark.parametrize("types", ["", "default_forward_type: FLOAT16 default_backward_type: FLOAT16 "])
@pytest.mark.parametrize("used", [False, True])
def test_weights_that_a_file_has_for_the_sharing_layer_alone_are_the_owners(phase: str, types: str, used: bool) -> None:
    text = types + DATA + inner("a", "data", PERMISSIVE, 2) + inner("b", "a", PERMISSIVE) + LOSS
    net = build_net(text, Phase.Value(phase))
    if used:
        net.forward()
    weights = NetParameter()
    layer = weights.layer.add(name="b")
    for shape in ((3, 2), (3,)):
        layer.blobs.add(shape=BlobShape(dim=shape), data=np.arange(np.prod(shape)) + 1)
    net.copy_trained_layers_from(weights, "w.caffemodel")
    a, b = (next(layer for layer in net.layers if layer.name == name) for name in "ab")
    net.forward()
    np.testing.assert_array_equal(a.blobs[0].host_data(), np.arange(1, 7).reshape(2, 3))
    np.testing.assert_array_equal(b.blobs[0].host_data(), np.arange(1, 7).reshape(3, 2))
    hidden = net.blobs["data"].host_data() @ np.arange(1, 7).reshape(2, 3).T + 1
    wanted = hidden @ np.arange(1, 7).reshape(3, 2).T + np.arange(1, 4)
    np.testing.assert_allclose(net.blobs["b"].host_data(), wanted, rtol=1e-5 if not types else 1e-2)


@pytest.mark.parametrize("types", ["", "default_forward_type: FLOAT16 default_backward_type: FLOAT16 "])
def test_a_test_net_that_shares_takes_each_layers_parameters_from_a_train_net_that_does_not(types: str) -> None:
    """Caffe's ShareTrainedLayersWith goes by layers; the names of parameters hold within a net."""
    train = build_net(types + DATA + inner("a", "data") + inner("b", "a") + LOSS)
    text = types + DATA + inner("a", "data", SHARED) + inner("b", "a", SHARED) + LOSS
    test = build_net(text, Phase.Value("TEST"), seed=9)
    test.share_trained_layers_with(train)
    for _ in range(2):
        train.forward()
        test.forward()
        for name, values in weights_of(train).items():
            np.testing.assert_array_equal(weights_of(test)[name], values)
        x, (a, b) = test.blobs["data"].host_data(), [layer for layer in train.layers if layer.blobs]
        hidden = x @ a.blobs[0].host_data().T + a.blobs[1].host_data()
        wanted = hidden @ b.blobs[0].host_data().T + b.blobs[1].host_data()
        error = 1e-2 if types else 1e-5
        np.testing.assert_allclose(test.blobs["b"].host_data(), wanted, rtol=error, atol=error)
        CPU.fill(train.parameters.data, 0.25)


def test_a_net_that_shares_across_layers_adds_up_gradients_though_values_are_another_nets() -> None:
    """Values are shared by layers, the gradient stays that of the parameter's name."""
    other = build_net(DATA + inner("a", "data") + inner("b", "a") + LOSS)
    net = build_net(DATA + inner("a", "data", SHARED) + inner("b", "a", SHARED) + LOSS)
    net.share_data_with(other)
    for each in (net, other):
        each.forward()
        each.backward()
    for mine, first, second in zip(net.layers[1].blobs, other.layers[1].blobs, other.layers[2].blobs, strict=True):
        total = first.host_diff() + second.host_diff()
        np.testing.assert_allclose(mine.host_diff(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "outputs", "message"),
    [
        ('param { name: "w" }', 'param { name: "w" }', 2, "cannot share param 'w' owned by layer 'a'; shape mismatch"),
        ('param { name: "w" }', 'param { name: "w" share_mode: PERMISSIVE }', 2, "owned by layer 'a'; count mismatch"),
        (
            'param { name: "w" lr_mult: 1 }',
            'param { name: "w" lr_mult: 2 }',
            3,
            "has lr_mult 2 here and 1 in layer 'a'",
        ),
        (
            'param { name: "w" decay_mult: 1 }',
            'param { name: "w" decay_mult: 0 }',
            3,
            "has decay_mult 0 here and 1 in layer 'a'",
        ),
    ],
)
def test_sharing_what_does_not_fit_is_refused(first: str, second: str, outputs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"layer 'b'.*{message}"):
        build_net(DATA + inner("a", "data", first) + inner("b", "a", second, outputs))


def test_a_multiplier_written_once_holds_for_all_sharers() -> None:
    net = build_net(
        DATA + inner("a", "data", 'param { name: "w" }') + inner("b", "a", 'param { name: "w" lr_mult: 3 }') + LOSS
    )
    assert net.parameters.parameters[0].lr_mult == 3


def test_sharing_convolution_weights_across_shapes_is_refused() -> None:
    conv = """layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 4 dim: 4 } } }
    layer { name: "a" type: "Convolution" bottom: "x" top: "a" param { name: "w" }
      convolution_param { num_output: 2 kernel_size: 3 bias_term: false } }
    layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" share_mode: PERMISSIVE }
      inner_product_param { num_output: 4 axis: 2 bias_term: false } }"""
    with pytest.raises(ConfigError, match="count mismatch"):
        build_net(conv)
    with pytest.raises(ConfigError, match="memory order is the logical order"):
        build_net(conv.replace("num_output: 4 axis: 2", "num_output: 9 axis: 2"))


@pytest.mark.parametrize(
    ("text", "count"), [("", 3), ("reduce_buckets: 6 ", 6), ("reduce_buckets: 1 ", 1), ("reduce_buckets: 0 ", 0)]
)
def test_a_net_may_say_how_many_there_are(text: str, count: int) -> None:
    assert bucket_count(text_format.Parse(text, NetParameter())) == count


def test_a_negative_number_of_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="the net's reduce_buckets is -2; give the number of parts in which"):
        bucket_count(text_format.Parse("reduce_buckets: -2", NetParameter()))
