"""BatchNorm: statistics in training and testing, Caffe's running sums, NVIDIA's scale and bias."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


def by_channel(values, axes):
    return np.reshape(values, (-1,) + (1,) * (axes - 2))


def batch_norm(x, *stored):
    axes = (0, *range(2, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


@settings(deadline=None, max_examples=15)
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
