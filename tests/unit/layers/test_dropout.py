"""Dropout: its statistics, and that the mask belongs to the samples and not to the device."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian

from caffepy.errors import ConfigError

TEXT = "type: 'Dropout' dropout_param { dropout_ratio: 0.3 }"


def ones(batch, backend="cpu", **settings):
    """Dropout's output for a batch of ones."""
    return Runner(TEXT, [np.ones((batch, 8, 5, 5), np.float32)], backend, **settings).forward()[0]


def test_gradient_and_in_place():
    check_layer(TEXT, [gaussian((4, 3, 5, 2))], in_place=True)


def test_testing_changes_nothing():
    check_layer(TEXT, [gaussian((4, 6))], lambda x: x, phase=TEST, in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keeps_seven_tenths_and_scales_them(backend):
    y = ones(100, backend)
    kept = y != 0
    assert abs(kept.mean() - 0.7) < 0.01  # 20,000 elements: three standard deviations
    assert np.allclose(y[kept], 1 / 0.7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_drops_what_forward_dropped(backend):
    x = np.ones((4, 50), np.float32)
    result = Runner(TEXT, [x], backend).run([x])
    assert np.array_equal(result.tops[0], result.bottom_diffs[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_does_not_depend_on_the_sharding(backend):
    whole = ones(6, backend, first_sample=12)
    parts = [ones(2, backend, first_sample=first) for first in (12, 14, 16)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_the_mask_changes_with_pass_seed_and_layer():
    first = ones(4)
    for other in (ones(4, pass_number=1), ones(4, seed=2), ones(4, first_sample=4)):
        assert not np.array_equal(first, other)
    named = Runner("name: 'drop7' " + TEXT, [np.ones((4, 8, 5, 5), np.float32)]).forward()[0]
    assert not np.array_equal(first, named)


def test_a_seed_of_its_own_replaces_the_solvers():
    text = "type: 'Dropout' dropout_param { random_seed: 5 }"
    x = [np.ones((2, 30), np.float32)]
    first, second = Runner(text, x, seed=1).forward()[0], Runner(text, x, seed=2).forward()[0]
    assert np.array_equal(first, second)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_ratio_out_of_range(value):
    with pytest.raises(ConfigError, match="dropout_ratio is .* at least 0 and below 1"):
        Runner(f"type: 'Dropout' dropout_param {{ dropout_ratio: {value} }}", [gaussian((2, 2))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_in_testing(backend):
    """`scale_train: false` drops without a factor in TRAIN, and multiplies by the chance to be kept in TEST."""
    text = TEXT.replace("0.3", "0.3 scale_train: false")
    x = gaussian((6, 7, 4))
    scaled, plain = (Runner(t, [x], backend).run([x]) for t in (TEXT, text))
    np.testing.assert_allclose(plain.tops[0], scaled.tops[0] * 0.7, rtol=1e-6)
    np.testing.assert_allclose(plain.bottom_diffs[0], scaled.bottom_diffs[0] * 0.7, rtol=1e-6)
    check_layer(text, [x], lambda x: 0.7 * x, phase=TEST, in_place=True)
    check_layer(text, [x], in_place=True)
