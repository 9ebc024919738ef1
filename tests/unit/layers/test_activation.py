"""Activations, elementary functions and dropout's neighbours: formulas, gradients, in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError
from caffepy.formats.dialect import Dialect

SHAPES = [(4,), (2, 3), (2, 3, 4, 5), (2, 3, 2, 3, 2)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = {
    "type: 'ReLU'": lambda x: np.maximum(x, 0),
    "type: 'ReLU' relu_param { negative_slope: 0.1 }": lambda x: np.where(x > 0, x, np.float32(0.1) * x),
    "type: 'ReLU' relu_param { negative_slope: -0.5 }": lambda x: np.where(x > 0, x, -0.5 * x),
    "type: 'ELU'": lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1),
    "type: 'ELU' elu_param { alpha: 0.5 lambda: 2 }": lambda x: np.where(x > 0, 2 * x, np.exp(np.minimum(x, 0)) - 1),
    "type: 'ELU' elu_param { alpha: -0.5 }": lambda x: np.where(x > 0, x, -0.5 * (np.exp(np.minimum(x, 0)) - 1)),
    "type: 'Sigmoid'": sigmoid,
    "type: 'TanH'": np.tanh,
    "type: 'AbsVal'": np.abs,
    "type: 'BNLL'": lambda x: np.log1p(np.exp(x)),
    "type: 'Power' power_param { power: 1 scale: 2 shift: 3 }": lambda x: 2 * x + 3,
    "type: 'Power' power_param { power: 2 scale: 0.5 shift: 1 }": lambda x: (0.5 * x + 1) ** 2,
    "type: 'Power' power_param { power: 3 scale: 0.5 shift: 0.5 }": lambda x: (0.5 * x + 0.5) ** 3,
    "type: 'Power' power_param { power: 0 }": np.ones_like,
    "type: 'Power' power_param { power: 2 scale: 0 shift: 3 }": lambda x: np.full_like(x, 9),
    "type: 'Exp' exp_param { base: 2 scale: 0.5 shift: 1 }": lambda x: 2 ** (1 + 0.5 * x),
    "type: 'Exp'": np.exp,
    "type: 'Clip' clip_param { min: -0.5 max: 0.75 }": lambda x: np.clip(x, -0.5, 0.75),
    "type: 'Swish' swish_param { beta: 1.5 }": lambda x: x * sigmoid(1.5 * x),
    "type: 'ReLU6'": lambda x: np.clip(x, 0, 6),
    "type: 'ReLU6' relu_param { negative_slope: 0.5 }": lambda x: np.where(x > 0, np.minimum(x, 6), 0.5 * x),
    "type: 'HardSwish'": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


@pytest.mark.parametrize("text", CASES)
def test_formula_gradient_and_in_place(text):
    check_layer(text, [spread((2, 3, 4, 5), step=0.03)], CASES[text], in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("alpha", "scale"), [(0.5, 2.0), (1.5, -0.5), (1.0, 1.0)])
@pytest.mark.parametrize("dialect", list(Dialect))
def test_the_gradient_of_elu_with_lambda_is_that_of_the_dialect(dialect, alpha, scale, in_place, backend):
    x = spread((2, 3, 4), step=0.3)
    settings = f"alpha: {alpha} lambda: {scale}"
    runner = Runner(f"type: 'ELU' elu_param {{ {settings} }}", [x], backend, in_place=in_place, dialect=dialect)
    dy = gaussian(x.shape)
    low = scale * alpha * np.exp(x) if dialect is Dialect.BVLC else scale * (alpha + scale * alpha * np.expm1(x))
    np.testing.assert_allclose(runner.run([dy]).bottom_diffs[0], dy * np.where(x > 0, scale, low), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ReLU6", "HardSwish"])
def test_beyond_the_kinks(kind):
    text = f"type: '{kind}'"
    check_layer(text, [spread((2, 3, 4, 5), step=0.31)], CASES[text], in_place=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_axes(shape):
    check_layer("type: 'Sigmoid'", [gaussian(shape)], sigmoid, in_place=True)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("type: 'Log' log_param { base: 3 scale: 1.5 shift: 0.5 }", lambda x: np.log(0.5 + 1.5 * x) / np.log(3)),
        ("type: 'Power' power_param { power: -0.5 scale: 2 shift: 1 }", lambda x: (2 * x + 1) ** -0.5),
        ("type: 'Power' power_param { power: 1.5 }", lambda x: x**1.5),
    ],
)
def test_functions_of_positive_numbers(text, reference):
    check_layer(text, [np.abs(gaussian((3, 4))) + 0.2], reference, in_place=True)


def test_threshold_has_no_gradient():
    check_layer("type: 'Threshold' threshold_param { threshold: 0.2 }", [spread((3, 4))], lambda x: (x > 0.2) * 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_values_stay_finite(backend):
    x = np.array([[-1e4, -100, 0, 100, 1e4]], np.float32)
    for text in ("type: 'Sigmoid'", "type: 'TanH'", "type: 'BNLL'", "type: 'ELU'", "type: 'Swish'"):
        result = Runner(text, [x], backend).run([np.ones_like(x)])
        assert np.isfinite(result.tops[0]).all(), text
        assert np.isfinite(result.bottom_diffs[0]).all(), text


@settings(max_examples=20)
@given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=5).map(tuple), shared=st.booleans())
def test_prelu(shape, shared):
    slopes = np.float32(0.3) if shared else np.linspace(-0.5, 0.5, shape[1]).astype(np.float32)

    def prelu(x, a):
        return np.maximum(x, 0) + a.reshape((-1,) + (1,) * (x.ndim - 2)) * np.minimum(x, 0)

    text = f"type: 'PReLU' prelu_param {{ channel_shared: {str(shared).lower()} }}"
    check_layer(text, [spread(shape)], prelu, params=[np.asarray(slopes)], in_place=True)


def test_prelu_starts_at_a_quarter():
    assert Runner("type: 'PReLU'", [gaussian((2, 3, 4, 4))]).layer.blobs[0].host_data().tolist() == [0.25] * 3


def test_prelu_needs_channels():
    with pytest.raises(ShapeError, match=r"layer 'L' \(PReLU\): .*two axes.*'a' is 4 \(4\)"):
        Runner("type: 'PReLU'", [gaussian((4,))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: 'Exp' exp_param { base: -2 }", "base is -2, but must be positive"),
        ("type: 'Log' log_param { base: 1 }", "base is 1, but must be positive and not 1"),
        ("type: 'Clip' clip_param { min: 1 max: 0 }", "min 1 above max 0"),
    ],
)
def test_settings_that_make_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        Runner(text, [gaussian((2, 3))])


# -- Dropout: the mask belongs to the samples and not to the device --------------------------------------


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
