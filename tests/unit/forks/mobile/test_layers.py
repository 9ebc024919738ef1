"""SeLU, SeLUDropout, Mish, NegSquare and depthwise convolutions."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError

LAMBDA, ALPHA = 1.050700987, 1.67326324


@pytest.mark.parametrize("text", ["type: 'SeLU'", "type: 'SeLu'"])
def test_selu(text: str) -> None:
    x = spread((2, 3, 4, 5), step=0.03)
    check_layer(
        text,
        [x],
        lambda x: LAMBDA * np.where(x > 0, x, ALPHA * (np.exp(np.minimum(x, 0)) - 1)),
        in_place=True,
    )
    text = "type: 'SeLU' selu_param { alpha: 0.5 lambda: 2 }"
    check_layer(text, [x], lambda x: np.where(x > 0, 2 * x, np.exp(np.minimum(x, 0)) - 1))


@pytest.mark.parametrize("text", ["type: 'SeLUDropout'", "type: 'SeLuDropout'"])
def test_dropout_keeps_mean_and_variance(text: str) -> None:
    x = gaussian((50, 400))
    runner = Runner(text + " selu_dropout_param { dropout_ratio: 0.2 }", [x])
    result = runner.run([np.ones_like(x)])
    y, dx = result.tops[0], result.bottom_diffs[0]
    assert dx is not None
    alpha = -LAMBDA * ALPHA
    factor = (0.8 * (1 + alpha**2 * 0.2)) ** -0.5
    term = -factor * 0.2 * alpha
    kept = dx != 0
    assert 0.78 < kept.mean() < 0.82
    np.testing.assert_allclose(dx[kept], factor, rtol=1e-5)
    np.testing.assert_allclose(y, np.where(kept, factor * x, factor * alpha) + term, rtol=1e-4, atol=1e-5)
    assert abs(y.mean()) < 0.02 and abs(y.std() - 1) < 0.02


def test_dropout_of_a_sample_is_the_same_on_every_device() -> None:
    x = gaussian((4, 30))
    text = "type: 'SeLUDropout' selu_dropout_param { dropout_ratio: 0.5 alpha: -1 }"
    whole = Runner(text, [x], first_sample=8).forward()[0]
    part = Runner(text, [x[2:]], first_sample=10).forward()[0]
    np.testing.assert_array_equal(whole[2:], part)


def test_dropout_in_place_and_in_tests() -> None:
    x = gaussian((4, 30))
    check_layer("type: 'SeLUDropout'", [x], lambda x: x, phase=TEST, in_place=True)
    check_layer("type: 'SeLUDropout'", [x], in_place=True, gradients=True)
    with pytest.raises(ConfigError, match="below 1"):
        Runner("type: 'SeLUDropout' selu_dropout_param { dropout_ratio: 1 }", [x])


# -- Mish ------------------------------------------------------------------------------------------------


def test_mish() -> None:
    x = spread((2, 3, 4, 5), step=0.03)
    check_layer("type: 'Mish'", [x], lambda x: x * np.tanh(np.log1p(np.exp(x))), in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_values_of_mish_stay_finite(backend: str) -> None:
    runner = Runner("type: 'Mish'", [np.array([-1e4, -200, 200, 1e4], np.float32)], backend)
    np.testing.assert_array_equal(runner.forward()[0], [0, 0, 200, 1e4])
    np.testing.assert_array_equal(runner.backward([np.ones(4, "f")])[0], [0, 0, 1, 1])


# -- NegSquare -------------------------------------------------------------------------------------------


def test_neg_square() -> None:
    check_layer("type: 'NegSquare'", [gaussian((2, 3, 4, 5))], lambda x: -(x**2), in_place=True)


# -- depthwise convolutions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DepthwiseConvolution", "ConvolutionDepthwise"])
def test_depthwise(kind):
    fields = "kernel_size: 3 pad: 1 stride: 2" + (" num_output: 6 group: 6" if kind == "DepthwiseConvolution" else "")
    x, weights, bias = gaussian((2, 6, 7, 5)), gaussian((6, 1, 3, 3), 1), gaussian((6,), 2)
    plain = Runner(
        "type: 'Convolution' convolution_param { num_output: 6 group: 6 kernel_size: 3 pad: 1 stride: 2 }",
        [x],
        params=[weights, bias],
    ).forward()[0]
    text = f"type: '{kind}' convolution_param {{ {fields} }}"
    for backend in BACKENDS:
        runner = Runner(text, [x], backend, params=[weights, bias])
        assert_near(runner.forward()[0], plain, 2e-5, kind)
    check_layer(text, [x], params=[weights, bias], step=0.05)


def test_depthwise_refuses():
    with pytest.raises(
        ShapeError, match="num_output is 12; a depthwise convolution has as many outputs as channels, 6"
    ):
        Runner(
            "type: 'ConvolutionDepthwise' convolution_param { num_output: 12 kernel_size: 3 }", [gaussian((2, 6, 7, 5))]
        )
