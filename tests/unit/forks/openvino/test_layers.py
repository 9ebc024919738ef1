"""GRN against its formula, the random factors of ScaleFilter, and filled Parameters."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 3), (2, 5, 3, 4)])
def test_grn_divides_by_the_length_of_each_pixel(shape: tuple[int, ...]) -> None:
    for bias in (1e-7, 0.5):
        check_layer(
            f"type: 'GRN' grn_param {{ bias: {bias} }}",
            [gaussian(shape)],
            lambda x, bias=bias: x / np.sqrt(np.square(x).sum(1, keepdims=True) + bias),
            in_place=True,
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_grn_without_bias_and_with_a_gradient_that_passes(backend: str) -> None:
    zeros = np.zeros((1, 2, 1, 1), np.float32)
    runner = Runner("type: 'GRN' grn_param { bias: 0 dummy_backward: true }", [zeros], backend)
    result = runner.run([gaussian(zeros.shape)])
    assert not result.tops[0].any()
    assert np.array_equal(result.bottom_diffs[0], gaussian(zeros.shape))


FACTORS = "type: 'ScaleFilter' scale_filter_param { min_scale: 0.5 max_scale: 2 }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_filter_draws_one_factor_for_each_channel_of_each_image(backend: str) -> None:
    x = gaussian((4, 50, 2, 3)) + 5
    runner = Runner(FACTORS, [x], backend, first_sample=6)
    factors = runner.forward()[0] / x
    first = factors[:, :, :1, :1]
    assert_near(factors, np.broadcast_to(first, x.shape), 1e-6, "factors of a channel")
    assert 0.5 <= first.min() < 0.55 and 1.95 < first.max() <= 2 and 1.15 < first.mean() < 1.35
    dy = gaussian(x.shape, 3)
    assert_near(runner.backward([dy])[0], factors * dy, 1e-6, "gradient")
    alone = Runner(FACTORS, [x[1:]], backend, first_sample=7).forward()[0]
    assert np.array_equal(alone, runner.forward()[0][1:])
    assert not np.allclose(Runner(FACTORS, [x], backend, first_sample=6, pass_number=1).forward()[0], x * factors)


def test_scale_filter_keeps_values_in_a_test() -> None:
    check_layer(FACTORS, [gaussian((2, 3, 2, 2))], lambda x: x, phase=TEST, in_place=True)
    check_layer(FACTORS, [gaussian((2, 3, 2))], in_place=True)


@pytest.mark.parametrize(
    ("text", "shape", "error"),
    [
        ("GRN' grn_param { bias: -1 }", (2, 3), "grn_param.bias is -1"),
        ("GRN' grn_param { bias: nan }", (2, 3), "grn_param.bias is nan"),
        ("GRN'", (2,), "two to four axes"),
        ("ScaleFilter'", (2, 3), "min_scale is 0 and max_scale 0"),
        ("ScaleFilter' scale_filter_param { min_scale: -1 max_scale: 1 }", (2, 3), "min_scale is -1 and max_scale 1"),
        ("ScaleFilter' scale_filter_param { min_scale: 2 max_scale: 1 }", (2, 3), "min_scale is 2 and max_scale 1"),
        ("ScaleFilter' scale_filter_param { min_scale: 2 max_scale: inf }", (2, 3), "max_scale inf"),
        ("ScaleFilter' scale_filter_param { min_scale: 1 max_scale: 2 }", (2,), "images and channels"),
    ],
)
def test_refused_settings(text: str, shape: tuple[int, ...], error: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=error):
        Runner(f"type: '{text}", [np.zeros(shape, np.float32)])


def test_a_filled_parameter() -> None:
    text = "type: 'Parameter' parameter_param { shape { dim: 2 dim: 3 } filler { type: 'constant' value: 3 } }"
    assert np.array_equal(Runner(text, []).forward()[0], np.full((2, 3), 3, np.float32))
