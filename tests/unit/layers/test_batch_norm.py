"""BatchNorm: statistics in training and testing, Caffe's running sums, NVIDIA's scale and bias."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError, SnapshotError
from caffepy.formats.binary import to_blob_proto
from caffepy.formats.dialect import Dialect
from caffepy.formats.proto import caffe_pb2
from caffepy.net.trained_layers import copy_trained_layers


def by_channel(values, axes):
    return np.reshape(values, (-1,) + (1,) * (axes - 2))


def batch_norm(x, *stored):
    axes = (0, *range(2, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


@settings(max_examples=15)
@given(batch=st.integers(2, 5), channels=st.integers(1, 5), spatial=st.lists(st.integers(1, 4), max_size=3).map(tuple))
def test_training_uses_the_batch(batch, channels, spatial):
    x = gaussian((batch + 2, channels, *spatial)) * 2 + 3
    check_layer("type: 'BatchNorm'", [x], batch_norm, learned=[], in_place=True)


def test_large_means_cost_no_digits():
    x = gaussian((8, 2, 5, 5)) + 1000
    y = Runner("type: 'BatchNorm'", [x]).forward()[0]
    assert np.allclose(y, batch_norm(x.astype(np.float64)), atol=2e-3)


def test_testing_uses_the_running_sums():
    stored = [gaussian((3,)) * 4, np.abs(gaussian((3,), 1)) * 4 + 1, np.array([4], np.float32)]

    def reference(x, mean, variance, count):
        return (x - by_channel(mean / count, x.ndim)) / np.sqrt(by_channel(variance / count, x.ndim) + 1e-5)

    x = [gaussian((2, 3, 4, 4))]
    check_layer("type: 'BatchNorm'", x, reference, params=stored, phase=TEST, learned=[], in_place=True)
    text = "type: 'BatchNorm' batch_norm_param { use_global_stats: true }"
    check_layer(text, x, reference, params=stored, learned=[])


def test_testing_before_any_training_takes_mean_and_variance_as_0():
    x = gaussian((2, 3))
    y = Runner("type: 'BatchNorm'", [x], phase=TEST).forward()[0]
    assert np.allclose(y, x / np.sqrt(1e-5), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_sums(backend):
    x = gaussian((4, 3, 2, 5))
    runner = Runner("type: 'BatchNorm' batch_norm_param { moving_average_fraction: 0.9 }", [x], backend)
    for _ in range(2):
        runner.forward()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3)) * 40 / 39
    for blob, wanted in zip(runner.layer.blobs, (1.9 * mean, 1.9 * variance, [1.9]), strict=True):
        assert np.allclose(blob.host_data(), wanted, rtol=1e-5)


def test_statistics_are_left_alone_when_stored_ones_are_used():
    runner = Runner("type: 'BatchNorm' batch_norm_param { use_global_stats: true }", [gaussian((4, 3))])
    before = [blob.host_data() for blob in runner.layer.blobs]
    runner.forward()
    assert all(np.array_equal(a, b.host_data()) for a, b in zip(before, runner.layer.blobs, strict=True))


@pytest.mark.parametrize("phase", [TEST, 0])
def test_scale_and_bias(phase):
    params = [
        np.zeros(3, np.float32),
        np.ones(3, np.float32),
        np.ones(1, np.float32),
        gaussian((3,)),
        gaussian((3,), 1),
    ]

    def reference(x, mean, variance, count, scale, bias):
        normal = x / np.sqrt(1 + 1e-5) if phase == TEST else batch_norm(x)
        return normal * by_channel(scale, x.ndim) + by_channel(bias, x.ndim)

    text = "type: 'BatchNorm' batch_norm_param { scale_bias: true }"
    check_layer(text, [gaussian((4, 3, 2, 3))], reference, params=params, phase=phase, learned=[3, 4], in_place=True)


def test_scale_filler_implies_scale_and_bias():
    text = "type: 'BatchNorm' batch_norm_param { scale_filler { type: 'constant' value: 2 } }"
    blobs = Runner(text, [gaussian((4, 3))]).layer.blobs
    assert [blob.host_data().tolist() for blob in blobs[3:]] == [[2, 2, 2], [0, 0, 0]]


def test_statistics_are_not_learned():
    param = Runner("type: 'BatchNorm'", [gaussian((4, 3))]).layer.param
    assert [spec.lr_mult for spec in param.param] == [0, 0, 0]
    with pytest.raises(ConfigError, match="param 0 holds statistics, .* lr_mult: 0"):
        Runner("type: 'BatchNorm' param { lr_mult: 1 }", [gaussian((4, 3))])


def test_shapes_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"at least two axes.*'a' is 4 \(4\)"):
        Runner("type: 'BatchNorm'", [gaussian((4,))])
    runner = Runner("type: 'BatchNorm'", [gaussian((4, 3))])
    runner.bottom[0].reshape((4, 5))
    with pytest.raises(ShapeError, match=r"the statistics need 3 channels \('a' is 4 5 \(20\); 'L\[0\]' is 3 \(3\)\)"):
        runner.layer.reshape(runner.bottom, runner.top)


NVIDIA = "type: 'BatchNorm' batch_norm_param { moving_average_fraction: 0.75 eps: 0.01 }"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", [NVIDIA, NVIDIA.replace("eps", "scale_bias: true eps")])
def test_nvidias_statistics(text, backend):
    """Copied in the first two passes of a layer, blended afterwards; eps is part of the variance; blob 2 stays 1."""
    runner = Runner(text, [gaussian((4, 3, 2, 5))], backend, dialect=Dialect.NVIDIA)
    wanted = []
    for index in range(4):
        x = gaussian((4, 3, 2, 5), index) * 2 + index
        runner.forward([x])
        new = x.mean((0, 2, 3)), x.var((0, 2, 3)) + 0.01
        wanted = list(new) if index < 2 else [0.75 * old + 0.25 * value for old, value in zip(wanted, new, strict=True)]
        found = [blob.host_data() for blob in runner.layer.blobs]
        for values, expected in zip(found, wanted, strict=False):
            assert np.allclose(values, expected, rtol=1e-5, atol=1e-6)
        assert found[2] == 1
    assert np.array_equal(runner.layer.backend.to_host(runner.layer.state()[0]), [4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("eps", "added"), [(0.01, 0.01), (1e-7, 1e-5)])
def test_nvidias_testing_ignores_blob_2_and_adds_eps_again(eps, added, backend):
    x, stored = gaussian((2, 3, 4, 4)), [gaussian((3,)), np.abs(gaussian((3,), 1)), np.array([4], np.float32)]
    text = f"type: 'BatchNorm' batch_norm_param {{ eps: {eps} }}"
    runner = Runner(text, [x], backend, phase=TEST, params=stored, dialect=Dialect.NVIDIA)
    wanted = (x - by_channel(stored[0], 4)) / np.sqrt(by_channel(stored[1], 4) + added)
    assert np.allclose(runner.forward()[0], wanted, rtol=1e-5, atol=1e-5)
    assert not runner.layer.state()


@pytest.mark.parametrize(("dialect", "scaled"), [(Dialect.NVIDIA, True), (Dialect.BVLC, False)])
@pytest.mark.parametrize("count", [4.0, 0.0])
def test_three_blobs_of_a_file_are_divided_by_the_third(dialect, scaled, count):
    stored = [gaussian((3,)), np.abs(gaussian((3,), 1)), np.array([count], np.float32)]
    five, layer = (
        Runner("type: 'BatchNorm'", [gaussian((2, 3, 4, 4))], params=stored, dialect=dialect).layer for _ in range(2)
    )
    five.convert_loaded(5)
    assert np.array_equal(five.blobs[0].host_data(), stored[0])
    assert five.blobs[2].host_data() == (count or 1)
    layer.convert_loaded(3)
    factor = (1 / count if count else 0) if scaled else 1
    for blob, values in zip(layer.blobs[:2], stored, strict=False):
        assert np.allclose(blob.host_data(), values * factor, rtol=1e-6)
    assert layer.blobs[2].host_data() == (1 if scaled else count)


def test_nvidias_statistics_over_several_devices():
    """With --sync-bn mean and variance are those of all devices, and they are blended in the same way."""
    x = gaussian((4, 3, 2, 5))
    runner = Runner(NVIDIA, [x], dialect=Dialect.NVIDIA)
    runner.layer.context.all_reduce_mean = lambda array: np.multiply(array, 2, out=array)
    runner.forward()
    mean = 2 * x.mean((0, 2, 3))
    variance = 2 * ((x - by_channel(mean, 4)) ** 2).mean((0, 2, 3)) + 0.01
    found = [blob.host_data() for blob in runner.layer.blobs]
    assert np.allclose(found[0], mean, rtol=1e-5) and np.allclose(found[1], variance, rtol=1e-5) and found[2] == 1


def test_nvidia_lets_statistics_have_a_learning_rate():
    """It sets the rate to 0 itself."""
    layer = Runner("type: 'BatchNorm' param { lr_mult: 2 }", [gaussian((2, 3, 1, 1))], dialect=Dialect.NVIDIA).layer
    assert [spec.lr_mult for spec in layer.param.param] == [0, 0, 0]


def stored_layer(name, values, shape=None):
    layer = caffe_pb2.LayerParameter(name=name, type="BatchNorm")
    for value in values:
        layer.blobs.append(to_blob_proto(np.reshape(value, shape(value) if shape else np.shape(value)), None))
    return caffe_pb2.NetParameter(layer=[layer])


def normed(text, backend="cpu"):
    return Runner(f"type: 'BatchNorm' {text} name: 'bn'", [gaussian((2, 3, 4, 4))], backend, phase=TEST)


def old_file_values():
    """scale, bias, mean, variance and the unused number, as NVIDIA Caffe 0.14 and 0.15 stored them."""
    return [gaussian((3,), 1), gaussian((3,), 2), gaussian((3,), 3), np.abs(gaussian((3,), 4)), np.zeros((1,), "f")]


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("shape", [None, lambda value: (1, value.size, 1, 1)])
def test_files_of_old_nvidia_versions_are_put_in_order(dialect, shape):
    scale, bias, mean, variance, _ = values = old_file_values()
    runner = Runner(
        "type: 'BatchNorm' name: 'bn' batch_norm_param { scale_bias: true }",
        [gaussian((2, 3, 4, 4))],
        phase=TEST,
        dialect=dialect,
    )
    copy_trained_layers([runner.layer], stored_layer("bn", values, shape), "old.caffemodel", ())
    for blob, wanted in zip(runner.layer.blobs, (mean, variance, [1], scale, bias), strict=True):
        assert np.array_equal(blob.host_data(), wanted)
    x = (runner.inputs[0] - by_channel(mean, 4)) / np.sqrt(by_channel(variance, 4) + 1e-5)
    assert np.allclose(runner.forward()[0], x * by_channel(scale, 4) + by_channel(bias, 4), rtol=1e-4, atol=1e-4)


def test_the_present_order_of_five_parameters_stays():
    scale, bias, mean, variance, _ = old_file_values()
    layer = normed("batch_norm_param { scale_bias: true }").layer
    values = [mean, variance, np.array([2], "f"), scale, bias]
    copy_trained_layers([layer], stored_layer("bn", values), "new.caffemodel", ())
    assert all(np.array_equal(b.host_data(), v) for b, v in zip(layer.blobs, values, strict=True))
    one = Runner("type: 'BatchNorm' name: 'bn' batch_norm_param { scale_bias: true }", [gaussian((2, 1, 4, 4))]).layer
    values = [np.full((1,), i, np.float32) for i in range(1, 6)]  # one channel: both orders have the same counts
    copy_trained_layers([one], stored_layer("bn", values), "new.caffemodel", ())
    assert [blob.host_data()[0] for blob in one.blobs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "number", "advice"),
    [
        ("", 5, r"5 parameters there and 3 in the net; the file has NVIDIA.*batch_norm_param { scale_bias: true }"),
        (
            "batch_norm_param { scale_bias: true }",
            3,
            r"3 parameters there and 5 in the net; .*no scale and bias: remove scale_bias",
        ),
        ("", 4, "4 parameters there and 3 in the net; rename the layer"),
    ],
)
def test_a_file_with_another_number_of_parameters(text, number, advice):
    values = [*([np.ones((3,), "f")] * 2), np.ones((1,), "f"), *([np.ones((3,), "f")] * 2)][:number]
    with pytest.raises(SnapshotError, match=f"w.caffemodel: layer 'bn' has {advice}"):
        copy_trained_layers([normed(text).layer], stored_layer("bn", values), "w.caffemodel", ())


def test_statistics_of_other_channels_are_refused():
    values = [np.ones((4,), "f"), np.ones((4,), "f"), np.ones((1,), "f")]
    with pytest.raises(SnapshotError, match=r"layer 'bn', parameter 0: shape is 4 \(4\) there and 3 \(3\) in the net"):
        copy_trained_layers([normed("").layer], stored_layer("bn", values), "w.caffemodel", ())


# -- Intel Caffe's fields --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["filler { value: 2 }", "filler { value: 2 } bias_filler { value: 3 }"])
def test_intels_filler_fills_a_scale(text):
    layer = normed(f"batch_norm_param {{ {text} }}").layer
    assert (layer.blobs[3].host_data() == 2).all()
    assert (layer.blobs[4].host_data() == (3 if "bias" in text else 0)).all()


def test_intels_use_weight_bias():
    assert len(normed("batch_norm_param { use_weight_bias: true }").layer.blobs) == 5
    assert len(normed("batch_norm_param { use_weight_bias: false }").layer.blobs) == 3


def by_parts(x, *params):
    scale, bias = params[3:]
    y = np.concatenate([batch_norm(part) for part in np.split(x, len(x) // 2)])
    return y * by_channel(scale, x.ndim) + by_channel(bias, x.ndim)


def test_parts_of_the_batch_have_their_own_statistics():
    params = [np.zeros(3, "f"), np.zeros(3, "f"), np.zeros(1, "f"), gaussian((3,)) + 1, gaussian((3,), 1)]
    text = "type: 'BatchNorm' batch_norm_param { filler { value: 1 } stats_batch_size: 2 }"
    x = gaussian((6, 3, 4, 2)) * 2 + 1
    check_layer(text, [x], by_parts, params=params, learned=[3, 4], in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_part_counts_in_the_running_sums(backend):
    x = gaussian((4, 3, 2, 5))
    text = "type: 'BatchNorm' batch_norm_param { moving_average_fraction: 0.9 stats_batch_size: 2 }"
    runner = Runner(text, [x], backend)
    runner.forward()
    mean = 0.9 * x[:2].mean((0, 2, 3)) + x[2:].mean((0, 2, 3))
    variance = (0.9 * x[:2].var((0, 2, 3)) + x[2:].var((0, 2, 3))) * 20 / 19
    for blob, wanted in zip(runner.layer.blobs, (mean, variance, [1.9]), strict=True):
        assert np.allclose(blob.host_data(), wanted, rtol=1e-5, atol=1e-6)


def test_batches_that_have_no_whole_parts():
    text = "type: 'BatchNorm' batch_norm_param { stats_batch_size: 4 }"
    x = gaussian((3, 2, 2, 2))
    assert np.allclose(Runner(text, [x]).forward()[0], batch_norm(x), atol=1e-5)
    with pytest.raises(ShapeError, match="a multiple of stats_batch_size, which is 4"):
        Runner(text, [gaussian((6, 2))])
