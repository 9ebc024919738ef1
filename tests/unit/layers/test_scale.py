"""Scale and Bias, learned and with a second bottom, over any axes; Axpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


@st.composite
def operands(draw):
    """A bottom's shape, an axis and the operand's shape."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple))
    axis = draw(st.integers(0, len(shape) - 1))
    count = draw(st.integers(0, len(shape) - axis))
    return shape, axis, shape[axis : axis + count]


def fit(operand, x, axis):
    """The operand with axes of size 1 where the bottom has more."""
    return (
        operand.reshape((1,) * axis + operand.shape + (1,) * (x.ndim - axis - operand.ndim))
        if operand.ndim
        else operand
    )


@settings(max_examples=30)
@given(operands(), st.booleans())
def test_learned_scale(case, bias):
    shape, axis, small = case
    text = (
        f"type: 'Scale' scale_param {{ axis: {axis} num_axes: {len(small)} bias_term: {str(bias).lower()} "
        "bias_filler { type: 'gaussian' } }"
    )
    params = [gaussian(small, 1)] + ([gaussian(small, 2)] if bias else [])

    def reference(x, scale, *bias):
        return x * fit(scale, x, axis) + sum(fit(b, x, axis) for b in bias)

    check_layer(text, [gaussian(shape)], reference, params=params, in_place=True)


@settings(max_examples=20)
@given(operands())
def test_scale_by_a_bottom(case):
    shape, axis, small = case
    text = f"type: 'Scale' scale_param {{ axis: {axis} }}"
    check_layer(text, [gaussian(shape), gaussian(small, 1)], lambda x, s: x * fit(s, x, axis))


def test_scale_by_a_bottom_with_learned_bias():
    text = "type: 'Scale' scale_param { axis: 0 bias_term: true }"

    def reference(x, scale, bias):
        return x * fit(scale, x, 0) + fit(bias, x, 0)

    check_layer(text, [gaussian((2, 3, 4)), gaussian((2, 3), 1)], reference, params=[gaussian((2, 3), 2)])


@settings(max_examples=20)
@given(operands(), st.booleans())
def test_bias(case, learned):
    shape, axis, small = case
    text = f"type: 'Bias' bias_param {{ axis: {axis} num_axes: {len(small)} }}"
    inputs, params = (
        ([gaussian(shape)], [gaussian(small, 1)]) if learned else ([gaussian(shape), gaussian(small, 1)], [])
    )
    check_layer(text, inputs, lambda x, b: x + fit(b, x, axis), params=params, in_place=learned)


def test_minus_one_takes_all_axes():
    runner = Runner("type: 'Scale' scale_param { axis: 1 num_axes: -1 bias_term: true }", [gaussian((2, 3, 4, 5))])
    assert [blob.shape for blob in runner.layer.blobs] == [(3, 4, 5), (3, 4, 5)]
    assert runner.layer.blobs[0].host_data().min() == 1
    assert runner.layer.blobs[1].host_data().max() == 0


def test_bias_alone_is_learned():
    runner = Runner("type: 'Scale' scale_param { bias_term: true }", [gaussian((4, 3, 2, 2))])
    runner.layer.propagate_to_params = [False, True]
    dy = gaussian((4, 3, 2, 2), 1)
    result = runner.run([dy])
    assert not result.param_diffs[0].any()
    assert np.allclose(result.param_diffs[1], dy.sum((0, 2, 3)), rtol=1e-4)


def test_refusals():
    with pytest.raises(ConfigError, match="num_axes 4 from axis 1 on goes past the bottom's 3 axes"):
        Runner("type: 'Scale' scale_param { num_axes: 4 }", [gaussian((2, 3, 4))])
    with pytest.raises(
        ShapeError, match=r"'b' must have the shape .* from 1 on \('a' is 2 3 4 \(24\); 'b' is 2 \(2\)\)"
    ):
        Runner("type: 'Scale'", [gaussian((2, 3, 4)), gaussian((2,))])
    with pytest.raises(ShapeError, match="axis 5 does not exist in shape 2 3"):
        Runner("type: 'Bias' bias_param { axis: 5 }", [gaussian((2, 3))])


def test_the_bias_beside_a_second_bottom_keeps_its_shape() -> None:
    runner = Runner("type: 'Scale' scale_param { axis: 0 bias_term: true }", [gaussian((4, 3)), gaussian((4,))])
    for blob, shape in zip(runner.bottom, ((8, 3), (8,)), strict=True):
        blob.reshape(shape)
    with pytest.raises(ShapeError, match=r"'L\[0\]' must have the shape of the bottom's axes from 0 on"):
        runner.layer.reshape(runner.bottom, runner.top)


# -- Axpy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 2), (2, 5)])
@pytest.mark.parametrize("tail", [(), (1, 1)])
def test_axpy(shape, tail):
    inputs = [gaussian((*shape[:2], *tail)), gaussian(shape, 1), gaussian(shape, 2)]
    check_layer("type: 'Axpy'", inputs, lambda a, x, b: a.reshape(a.shape[:2] + (1,) * (len(shape) - 2)) * x + b)


def test_axpy_refuses():
    x = gaussian((2, 3, 4, 5))
    with pytest.raises(ShapeError, match="one factor for each channel of the second"):
        Runner("type: 'Axpy'", [gaussian((2, 4)), x, x])
    with pytest.raises(ShapeError, match="the second and the third bottom must have one shape"):
        Runner("type: 'Axpy'", [gaussian((2, 3)), x, gaussian((2, 3, 5, 4))])
