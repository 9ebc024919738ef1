"""Eltwise, Concat, Slice, Split and Silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import Runner, assert_near, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@settings(max_examples=10)
@given(shape=shapes, count=st.integers(2, 4), coefficients=st.booleans())
def test_sum(shape, count, coefficients):
    factors = [0.5 * i - 1 for i in range(count)] if coefficients else [1.0] * count
    text = "type: 'Eltwise' eltwise_param { " + " ".join(f"coeff: {f}" for f in factors if coefficients) + " }"
    inputs = [gaussian(shape, i) for i in range(count)]
    check_layer(text, inputs, lambda *xs: sum(f * x for f, x in zip(factors, xs, strict=True)), in_place=True)


@settings(max_examples=10)
@given(shape=shapes, count=st.integers(2, 4), stable=st.booleans())
def test_product(shape, count, stable):
    text = f"type: 'Eltwise' eltwise_param {{ operation: PROD stable_prod_grad: {str(stable).lower()} }}"
    inputs = [np.sign(x) * (np.abs(x) + 0.5) for x in (gaussian(shape, i) for i in range(count))]
    check_layer(text, inputs, lambda *xs: np.prod(xs, axis=0), in_place=True)


def test_stable_product_gradient_survives_zeros():
    zero, two = np.zeros((1, 2), np.float32), np.full((1, 2), 2, np.float32)
    result = Runner("type: 'Eltwise' eltwise_param { operation: PROD }", [zero, two]).run([two])
    assert result.bottom_diffs[0].tolist() == [[4, 4]]


@settings(max_examples=10)
@given(shape=shapes, count=st.integers(2, 4))
def test_maximum(shape, count):
    parts = spread((count, *shape))
    text = "type: 'Eltwise' eltwise_param { operation: MAX }"
    check_layer(text, list(parts), lambda *xs: np.max(xs, axis=0), in_place=True)


def test_equal_maxima_give_the_gradient_to_one_bottom():
    one = np.ones((1, 3), np.float32)
    result = Runner("type: 'Eltwise' eltwise_param { operation: MAX }", [one, one, one]).run([one])
    assert [diff.tolist() for diff in result.bottom_diffs] == [[[0, 0, 0]], [[1, 1, 1]], [[0, 0, 0]]]


@pytest.mark.parametrize("operation", ["SUM", "PROD", "MAX"])
def test_eltwise_in_place_and_overwritten(operation):
    """A later layer works in place on the same blob: neither it nor the gradient that lies in the top's diff show."""
    text = f"type: 'Eltwise' eltwise_param {{ operation: {operation} stable_prod_grad: false }}"
    inputs = [gaussian((2, 3, 4, 5), i) for i in range(3)]
    wanted = Runner(text, inputs).run([gaussian((2, 3, 4, 5), 9)])
    runner = Runner(text, inputs, in_place=True)
    runner.layer.tops_overwritten = True
    assert_near(runner.forward()[0], wanted.tops[0], 1e-6, "top")
    runner.layer.backend.fill(runner.top[0].data, float("nan"))
    backend = runner.layer.backend
    backend.from_host(gaussian((2, 3, 4, 5), 9), runner.top[0].diff)
    runner.layer.backward(runner.top, [True] * 3, runner.bottom)
    for blob, diff in zip(runner.bottom, wanted.bottom_diffs, strict=True):
        assert_near(blob.host_diff(), diff, 1e-6, blob.name)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_a_sum_in_place_writes_only_the_gradients_that_are_wanted(wanted):
    text = "type: 'Eltwise' eltwise_param { coeff: 2 coeff: 3 }"
    runner, dy = Runner(text, [gaussian((2, 3)), gaussian((2, 3), 1)], in_place=True), gaussian((2, 3), 2)
    runner.forward()
    backend = runner.layer.backend
    backend.fill(runner.bottom[1].diff, 7)
    backend.from_host(dy, runner.top[0].diff)
    runner.layer.backward(runner.top, list(wanted), runner.bottom)
    assert np.array_equal(runner.bottom[0].host_diff(), 2 * dy if wanted[0] else dy)
    assert np.array_equal(runner.bottom[1].host_diff(), 3 * dy if wanted[1] else np.full((2, 3), 7))


def test_eltwise_refusals():
    x, y = gaussian((2, 3)), gaussian((2, 4))
    with pytest.raises(ShapeError, match=r"one shape \('a' is 2 3 \(6\); 'b' is 2 4 \(8\)\)"):
        Runner("type: 'Eltwise'", [x, y])
    with pytest.raises(ConfigError, match="coeff is given 1 times, but must be once for each of 2 bottoms"):
        Runner("type: 'Eltwise' eltwise_param { coeff: 1 }", [x, x])
    with pytest.raises(ConfigError, match="coeff is for operation: SUM only"):
        Runner("type: 'Eltwise' eltwise_param { operation: PROD coeff: 1 coeff: 1 }", [x, x])


@settings(max_examples=20)
@given(shape=shapes, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_concat_and_slice_are_inverse(shape, sizes, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for i, size in enumerate(sizes):
        part = list(shape)
        part[axis] = size
        parts.append(gaussian(tuple(part), i))
    check_layer(f"type: 'Concat' concat_param {{ axis: {axis} }}", parts, lambda *xs: np.concatenate(xs, axis))
    ends = np.cumsum(sizes)[:-1]
    points = " ".join(f"slice_point: {end}" for end in ends)
    check_layer(
        f"type: 'Slice' slice_param {{ axis: {axis} {points} }}",
        [np.concatenate(parts, axis)],
        lambda x: tuple(np.split(x, ends, axis)),
        tops=len(sizes),
    )


def test_slice_evenly_by_default_and_along_the_old_name():
    runner = Runner("type: 'Slice' slice_param { slice_dim: 0 }", [gaussian((6, 2))], tops=3)
    assert [blob.shape for blob in runner.top] == [(2, 2)] * 3


@pytest.mark.parametrize(
    ("text", "tops", "error", "message"),
    [
        ("", 4, ShapeError, r"4 tops do not divide axis 1 evenly; give slice_point \('a' is 2 6 \(12\)\)"),
        ("slice_point: 4 slice_point: 2", 3, ShapeError, r"slice points \[4, 2\] must rise"),
        ("slice_point: 7", 2, ShapeError, "must rise within axis 1"),
        ("slice_point: 2", 3, ConfigError, "3 tops need 2 slice points, but there are 1"),
        ("axis: 1 slice_dim: 1", 2, ConfigError, "either axis or slice_dim"),
        ("axis: 2", 2, ShapeError, "axis 2 does not exist in shape 2 6"),
    ],
)
def test_slice_refusals(text, tops, error, message):
    with pytest.raises(error, match=message):
        Runner(f"type: 'Slice' slice_param {{ {text} }}", [gaussian((2, 6))], tops=tops)


def test_concat_refusals():
    with pytest.raises(ShapeError, match=r"every axis but 1 \('a' is 2 3 4 \(24\); 'b' is 2 3 5 \(30\)\)"):
        Runner("type: 'Concat'", [gaussian((2, 3, 4)), gaussian((2, 3, 5))])
    with pytest.raises(ConfigError, match="either axis or concat_dim"):
        Runner("type: 'Concat' concat_param { axis: 1 concat_dim: 1 }", [gaussian((2, 3))])


@settings(max_examples=10)
@given(shape=shapes, count=st.integers(1, 4))
def test_split(shape, count):
    check_layer("type: 'Split'", [gaussian(shape)], lambda x: (x,) * count, tops=count)


def test_split_shares_memory():
    runner = Runner("type: 'Split'", [gaussian((2, 3, 4, 4))], tops=2)
    runner.forward()
    assert runner.top[0].data is runner.bottom[0].data
    assert runner.top[1].data is runner.bottom[0].data


def test_silence_stops_gradients():
    result = Runner("type: 'Silence'", [gaussian((2, 3)), gaussian((4,))]).run([])
    assert [diff.any() for diff in result.bottom_diffs] == [False, False]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_wins_a_maximum(where):
    inputs = [gaussian((3, 4), i) for i in range(3)]
    inputs[where][1, 2] = np.nan
    result = Runner("type: 'Eltwise' eltwise_param { operation: MAX }", inputs).run([np.ones((3, 4), np.float32)])
    np.testing.assert_array_equal(result.tops[0], np.maximum(np.maximum(*inputs[:2]), inputs[2]))
    assert [diff[1, 2] for diff in result.bottom_diffs] == [float(i == where) for i in range(3)]


@pytest.mark.parametrize("shapes", [[(2, 3, 4, 5), (2, 6, 1, 2)], [(2, 3, 4), (2, 1, 2)], [(2, 3, 4, 5)]])
def test_concat_of_flattened_bottoms(shapes):
    def reference(*xs):
        flat = np.concatenate([x.reshape(len(x), -1) for x in xs], 1)
        return flat.reshape(*flat.shape, *(1,) * (xs[0].ndim - 2))

    check_layer("type: 'Concat' concat_param { per_fla_fuse: true }", [gaussian(s) for s in shapes], reference)


def test_concat_of_flattened_bottoms_refuses():
    with pytest.raises(ConfigError, match="per_fla_fuse is for axis 1, not 2"):
        Runner("type: 'Concat' concat_param { per_fla_fuse: true axis: 2 }", [gaussian((2, 3, 4))])
    with pytest.raises(ShapeError, match="must agree in their first axis"):
        Runner("type: 'Concat' concat_param { per_fla_fuse: true }", [gaussian((2, 3)), gaussian((3, 3))])
