"""Checks of one primitive each, for any backend: draws numbers, calls the backend, compares with `backend_oracle`.

Test modules choose the backend and the settings (with the strategies at the end); a check only needs those.
"""

from __future__ import annotations

import math
from typing import Any

import backend_oracle as oracle
import numpy as np
from hypothesis import strategies as st

from caffepy.backend import Backend, Channel, Each, Geometry, LrnWindow, RandomStream, Scalar, expression
from caffepy.backend.types import spatial_output

TOLERANCE = 1e-5
"""Allowed distance relative to the array's largest value: what float32 gives."""


def close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Assert equal shapes and values within `tolerance` of the largest expected one; NaN and inf must coincide."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    finite = np.isfinite(expected)
    limit = tolerance * max(1e-30, np.abs(expected[finite]).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


def normal(seed: int, shape: tuple[int, ...]) -> Any:
    """Float32 numbers, different ones for each seed."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def to_device(backend: Backend, host: Any, dtype: str = "float32") -> Any:
    """The numbers on the backend."""
    array = backend.zeros(np.shape(host), dtype)
    backend.from_host(np.asarray(host), array)
    return array


def dirty(backend: Backend, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """An output array full of a number that must not be there afterwards."""
    array = backend.zeros(shape, dtype)
    backend.fill(array, 77)
    return array


# -- memory -----------------------------------------------------------------------------------------------


def check_memory(backend: Backend, shape: tuple[int, ...]) -> None:
    """zeros, from_host, to_host, flat, view, copy, add, fill."""
    host = normal(1, shape)
    array = to_device(backend, host)
    assert np.array_equal(backend.to_host(array), host)
    assert backend.to_host(array).flags.c_contiguous
    again = backend.view(backend.flat(array), shape)
    assert np.array_equal(backend.to_host(again), host)
    other = dirty(backend, shape)
    backend.copy(array, other)
    assert np.array_equal(backend.to_host(other), host)
    backend.add(array, other)
    assert np.array_equal(backend.to_host(other), host + host)
    backend.fill(array, 2.5)
    assert np.array_equal(backend.to_host(again), np.full(shape, 2.5, np.float32))


def check_reshaped(backend: Backend, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """The logical order of the elements survives a reshape."""
    host = normal(2, old)
    result = backend.reshaped(to_device(backend, host), new)
    assert np.array_equal(backend.to_host(result), host.reshape(new))
    backend.flat(result)


def check_slices(backend: Backend, shape: tuple[int, int, int, int], axis: int, start: int, stop: int) -> None:
    """copy and add of a slice along an axis."""
    index = tuple(slice(start, stop) if a == axis else slice(None) for a in range(4))
    host, part = normal(3, shape), normal(4, shape)[index]
    array, piece = to_device(backend, host), to_device(backend, part)
    backend.add(piece, array[index])
    expected = host.copy()
    expected[index] += part
    assert np.array_equal(backend.to_host(array), expected)
    backend.copy(array[index], piece)
    assert np.array_equal(backend.to_host(piece), expected[index])


# -- elementwise and reductions ---------------------------------------------------------------------------


@expression
def mixed(x: Each, y: Each, gain: Channel, slope: Scalar) -> Each:
    shifted = gain * x + y
    return shifted if shifted > 0 else slope * shifted


@expression
def plain(x: Each, y: Each, slope: Scalar) -> Each:
    return x - slope * y


@expression
def two(x: Each, y: Each) -> tuple[Each, Each]:
    return x * y, x + y


@expression
def centred_square(x: Each, mean: Channel) -> Each:
    return (x - mean) ** 2


def _channels(shape: tuple[int, ...], axis: int, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a `Channel` argument, and the same with ones for broadcasting."""
    own = shape[axis : axis + axes]
    return own, own + (1,) * (len(shape) - axis - axes)


def check_apply(backend: Backend, shape: tuple[int, ...], axis: int, axes: int) -> None:
    """Formulas with channels, without, with two results and in place."""
    own, spread = _channels(shape, axis, axes)
    x, y, gain = normal(1, shape), normal(2, shape), normal(3, own)
    dx, dy, dgain = to_device(backend, x), to_device(backend, y), to_device(backend, gain)
    out = dirty(backend, shape)
    backend.apply(mixed, (dx, dy, dgain, 0.1), (out,), axis)
    value = gain.reshape(spread).astype(float) * x + y
    close(backend.to_host(out), np.where(value > 0, value, 0.1 * value))
    backend.apply(plain, (dx, dy, 0.25), (dx,))
    close(backend.to_host(dx), x - 0.25 * y.astype(float))
    second = dirty(backend, shape)
    backend.from_host(x, dx)
    backend.apply(two, (dx, dy), (out, second))
    close(backend.to_host(out), x.astype(float) * y)
    close(backend.to_host(second), x.astype(float) + y)


def check_reduce(backend: Backend, shape: tuple[int, ...], axis: int, axes: int) -> None:
    """Sums over all axes but some, with channels and without, overwriting and adding, twice the same bits."""
    own, spread = _channels(shape, axis, axes)
    x, y, mean = normal(1, shape), normal(2, shape), normal(3, own)
    dx, dy, dmean = to_device(backend, x), to_device(backend, y), to_device(backend, mean)
    summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + axes)
    products, sums = x.astype(float) * y, x.astype(float) + y
    first, second = dirty(backend, own), dirty(backend, own)
    backend.reduce(two, (dx, dy), (first, second), axis)
    close(backend.to_host(first), products.sum(axis=summed), 1e-5 * math.sqrt(math.prod(shape)))
    close(backend.to_host(second), sums.sum(axis=summed), 1e-5 * math.sqrt(math.prod(shape)))
    once = backend.to_host(first)
    backend.reduce(two, (dx, dy), (first, second), axis)
    assert np.array_equal(backend.to_host(first), once)
    squares = (x.astype(float) - mean.reshape(spread)) ** 2
    backend.fill(first, 3)
    backend.reduce(centred_square, (dx, dmean), (first,), axis, accumulate=True)
    close(backend.to_host(first), squares.sum(axis=summed) + 3)
    total = dirty(backend, ())
    backend.reduce(centred_square, (dx, dmean), (total,), axis)
    close(backend.to_host(total), squares.sum())
    differences = (x - 0.25 * y.astype(float)).sum(axis=summed)
    for quarter in (0.25, to_device(backend, np.float32(0.25))):
        backend.reduce(plain, (dx, dy, quarter), (first,), axis)
        close(backend.to_host(first), differences, 1e-5 * math.sqrt(math.prod(shape)))


def check_gemm(backend: Backend, m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, sliced: bool) -> None:
    """Products of matrices and of slices of wider ones, overwriting and adding."""
    a, b = normal(1, (k, m) if transpose_a else (m, k)), normal(2, (n, k) if transpose_b else (k, n))
    c = normal(3, (m, n))
    extra = 5 if sliced else 0

    def matrix(host: Any) -> Any:
        wide = backend.zeros((host.shape[0], host.shape[1] + extra))
        backend.fill(wide, 9)
        view = wide[:, extra // 2 : extra // 2 + host.shape[1]]
        backend.from_host(host, view)
        return view

    da, db, dc = matrix(a), matrix(b), matrix(c)
    expected = (a.T if transpose_a else a).astype(float) @ (b.T if transpose_b else b).astype(float)
    backend.gemm(da, db, dc, transpose_a, transpose_b, accumulate=True)
    close(backend.to_host(dc), expected + c)
    backend.gemm(da, db, dc, transpose_a, transpose_b)
    close(backend.to_host(dc), expected)
    turned = backend.zeros((n, m)).T
    backend.gemm(da, db, turned, transpose_a, transpose_b)
    close(backend.to_host(turned), expected)


# -- windows ----------------------------------------------------------------------------------------------


def convolution_shape(x_shape: tuple[int, ...], outputs: int, g: Geometry) -> tuple[int, ...]:
    """The shape of a convolution's output."""
    sizes = zip(x_shape[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
    return (x_shape[0], outputs, *(spatial_output(*s) for s in sizes))


def check_convolution(
    backend: Backend, x_shape: tuple[int, ...], outputs: int, geometry: Geometry, tolerance: float = TOLERANCE
) -> None:
    """Forward with and without bias, both gradients, weights' gradient overwritten and added to."""
    weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
    y_shape = convolution_shape(x_shape, outputs, geometry)
    x, weights, bias, dy = normal(1, x_shape), normal(2, weights_shape), normal(3, (outputs,)), normal(4, y_shape)
    on_x, on_weights, on_bias, on_dy = (to_device(backend, a) for a in (x, weights, bias, dy))
    plan = backend.plan_convolution(x_shape, weights_shape, geometry)
    expected = oracle.convolution(x.astype(float), weights.astype(float), bias, geometry, y_shape[2:])
    y = dirty(backend, y_shape)
    plan.forward(on_x, on_weights, on_bias, y)
    close(backend.to_host(y), expected, tolerance)
    plan.forward(on_x, on_weights, None, y)
    close(backend.to_host(y), expected - bias.reshape((-1,) + (1,) * len(geometry.kernel)), 2 * tolerance)
    dx_expected, dw_expected = oracle.convolution_gradients(x.astype(float), weights.astype(float), dy, geometry)
    dweights = dirty(backend, weights_shape)
    plan.backward_weights(on_x, on_dy, dweights, accumulate=False)
    close(backend.to_host(dweights), dw_expected, tolerance)
    plan.backward_weights(on_x, on_dy, dweights, accumulate=True)
    close(backend.to_host(dweights), 2 * dw_expected, tolerance)
    dx = dirty(backend, x_shape)
    plan.backward_data(on_dy, on_weights, dx)
    close(backend.to_host(dx), dx_expected, tolerance)


def check_pool_max(
    backend: Backend, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry, ties: bool = False
) -> None:
    """Maximum pooling and its gradient; with ties the first maximum wins."""
    y_shape = (*x_shape[:2], *y_size)
    x, dy = normal(1, x_shape), normal(2, y_shape)
    if ties:
        x = np.round(x)
    expected, places = oracle.pool_max(x, y_shape, geometry)
    on_x, y, mask = to_device(backend, x), dirty(backend, y_shape), dirty(backend, y_shape, "int32")
    backend.pool_max_forward(on_x, y, mask, geometry)
    assert np.array_equal(backend.to_host(y), expected.astype(np.float32))
    assert np.array_equal(backend.to_host(mask), places)
    dx = dirty(backend, x_shape)
    backend.pool_max_backward(to_device(backend, dy), mask, dx, geometry)
    close(backend.to_host(dx), oracle.pool_max_gradient(dy, places, x_shape))


def check_pool_average(backend: Backend, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry) -> None:
    """Average pooling and its gradient."""
    y_shape = (*x_shape[:2], *y_size)
    x, dy = normal(1, x_shape), normal(2, y_shape)
    y, dx = dirty(backend, y_shape), dirty(backend, x_shape)
    backend.pool_average_forward(to_device(backend, x), y, geometry)
    close(backend.to_host(y), oracle.pool_average(x.astype(float), y_shape, geometry))
    backend.pool_average_backward(to_device(backend, dy), dx, geometry)
    close(backend.to_host(dx), oracle.pool_average_gradient(dy, x_shape, geometry))


def check_lrn(backend: Backend, shape: tuple[int, ...], size: int, alpha: float, beta: float, k: float) -> None:
    """Normalisation across channels and its gradient."""
    x, dy = normal(1, shape), normal(2, shape)
    on_x, y = to_device(backend, x), dirty(backend, shape)
    scale = dirty(backend, shape) if backend.keeps_lrn_scale else None
    backend.lrn_across_forward(on_x, y, scale, LrnWindow(size, alpha, beta, k))
    expected, expected_scale = oracle.lrn(x.astype(float), size, alpha, beta, k)
    close(backend.to_host(y), expected)
    if scale is not None:
        close(backend.to_host(scale), expected_scale)
    dx, kept = dirty(backend, shape), None if scale is None else y
    backend.lrn_across_backward(on_x, kept, scale, to_device(backend, dy), dx, LrnWindow(size, alpha, beta, k))
    close(backend.to_host(dx), oracle.lrn_gradient(x.astype(float), dy.astype(float), size, alpha, beta, k), 2e-5)


# -- softmax ----------------------------------------------------------------------------------------------


def check_softmax(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    """Softmax and its gradient, also far from zero."""
    x, dy = normal(1, shape) * 30 + 200, normal(2, shape)
    y, dx = dirty(backend, shape), dirty(backend, shape)
    backend.softmax_forward(to_device(backend, x), y, axis)
    expected = oracle.softmax(x.astype(float), axis)
    close(backend.to_host(y), expected)
    backend.softmax_backward(y, to_device(backend, dy), dx, axis)
    gradient = oracle.softmax_gradient(backend.to_host(y).astype(float), dy.astype(float), axis)
    np.testing.assert_allclose(backend.to_host(dx), gradient, rtol=0, atol=1e-6)


def _labels(shape: tuple[int, ...], axis: int) -> Any:
    positions = shape[:axis] + shape[axis + 1 :]
    return np.random.default_rng(5).integers(0, shape[axis], positions).astype(np.float32)


def check_softmax_loss(
    backend: Backend, shape: tuple[int, ...], axis: int, ignore_label: int | None, divide_by_valid: bool
) -> None:
    """The loss, the number of labels that count, and the gradient."""
    x, labels = normal(1, shape) * 4, _labels(shape, axis)
    on_labels, probabilities = to_device(backend, labels), dirty(backend, shape)
    totals, bad = dirty(backend, (2,)), to_device(backend, [-1], "int32")
    backend.softmax_loss_forward(to_device(backend, x), on_labels, probabilities, totals, bad, axis, ignore_label)
    loss, counted, _ = oracle.softmax_loss(x.astype(float), labels, axis, ignore_label)
    measured = backend.to_host(totals)
    np.testing.assert_allclose(measured[0], loss, rtol=1e-5, atol=1e-6)
    assert measured[1] == counted
    assert backend.to_host(bad)[0] == -1
    dx = dirty(backend, shape)
    divisor = totals if divide_by_valid else None
    backend.softmax_loss_backward(probabilities, on_labels, dx, divisor, axis, ignore_label, 0.5)
    scale = 0.5 / max(counted, 1) if divide_by_valid else 0.5
    expected = oracle.softmax_loss_gradient(oracle.softmax(x.astype(float), axis), labels, axis, ignore_label, scale)
    # A probability near 1 less 1 leaves the rounding of 1, so the scale and not the largest gradient is the measure.
    np.testing.assert_allclose(backend.to_host(dx), expected, rtol=0, atol=TOLERANCE * scale)


def check_bad_labels(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    """A label that is no class is reported, not counted, and has rank -1."""
    x, labels = normal(1, shape), _labels(shape, axis)
    labels.reshape(-1)[-1] = shape[axis]
    if labels.size > 2:
        labels.reshape(-1)[1] = -3
    probabilities, totals = dirty(backend, shape), dirty(backend, (2,))
    on_x, on_labels = to_device(backend, x), to_device(backend, labels)
    _, counted, indices = oracle.softmax_loss(x.astype(float), labels, axis, None)
    bad = to_device(backend, [-1], "int32")
    backend.softmax_loss_forward(on_x, on_labels, probabilities, totals, bad, axis, None)
    assert backend.to_host(totals)[1] == counted
    assert int(backend.to_host(bad)[0]) in indices
    ranks, bad = dirty(backend, labels.shape), to_device(backend, [-1], "int32")
    backend.label_ranks(on_x, on_labels, ranks, bad, axis)
    assert np.array_equal(backend.to_host(ranks), oracle.label_ranks(x, labels, axis))
    assert int(backend.to_host(bad)[0]) in indices


def check_label_ranks(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    """How many classes score as high as the label's, with ties."""
    x, labels = np.round(normal(1, shape)), _labels(shape, axis)
    ranks, bad = dirty(backend, labels.shape), to_device(backend, [-1], "int32")
    for higher_wins in (False, True):
        backend.label_ranks(to_device(backend, x), to_device(backend, labels), ranks, bad, axis, higher_wins)
        assert np.array_equal(backend.to_host(ranks), oracle.label_ranks(x, labels, axis, higher_wins))
        assert backend.to_host(bad)[0] == -1


def check_smoothing(backend: Backend, shape: tuple[int, ...], axis: int, ignore_label: int | None) -> None:
    """The change of the loss's sum and of its gradient, for labels that count."""
    p, labels = oracle.softmax(normal(1, shape).astype(float) * 4, axis), _labels(shape, axis)
    on_labels, totals = to_device(backend, labels), to_device(backend, [3, 7])
    backend.smooth_loss_forward(to_device(backend, p), on_labels, totals, axis, ignore_label, 0.2)
    classes = np.arange(shape[axis]).reshape(-1, *(1 for _ in shape[axis + 1 :]))
    onehot = (np.expand_dims(labels, axis) == classes).astype(float)
    counts = np.expand_dims(labels != ignore_label, axis)
    change = 0.2 * ((1 / shape[axis] - onehot) * -np.log(p) * counts).sum()
    np.testing.assert_allclose(backend.to_host(totals), [3 + change, 7], rtol=1e-5)
    dx = normal(2, shape)
    for divisor, factor in ((None, 0.5), (totals, 0.5 / 7)):
        found = to_device(backend, dx)
        backend.smooth_loss_backward(on_labels, found, divisor, axis, ignore_label, 0.5)
        close(backend.to_host(found), dx + (onehot - 1 / shape[axis]) * factor * counts)


# -- random numbers and health ----------------------------------------------------------------------------


def check_random_uniform(
    backend: Backend, shape: tuple[int, ...], seed: int, stream: int, pass_number: int, first_sample: int
) -> None:
    """The same bits as the oracle."""
    out = dirty(backend, shape)
    backend.random_uniform(out, RandomStream(seed, stream), (pass_number, first_sample))
    expected = oracle.random_uniform(shape, seed, stream, pass_number, first_sample)
    assert np.array_equal(backend.to_host(out), expected)


def check_all_finite(backend: Backend, shape: tuple[int, ...]) -> None:
    """One NaN or infinity anywhere is found, the largest float32 is not one."""
    host = normal(1, shape)
    host.reshape(-1)[0] = np.finfo(np.float32).max
    assert backend.all_finite(to_device(backend, host))
    for value in (np.nan, np.inf, -np.inf):
        for index in (0, host.size // 2, host.size - 1):
            spoiled = host.copy()
            spoiled.reshape(-1)[index] = value
            assert not backend.all_finite(to_device(backend, spoiled))


# -- strategies -------------------------------------------------------------------------------------------

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8])
CHANNELS = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 17, 33])


@st.composite
def convolutions(draw: Any) -> tuple[tuple[int, ...], int, Geometry]:
    """(x's shape, outputs, geometry) of a convolution over two axes that has an output."""
    group = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inputs = group * draw(st.sampled_from([1, 2, 3, 7, 16]))
    outputs = group * draw(st.sampled_from([1, 2, 3, 7, 16, 20, 33]))
    kernel, stride, pad, dilation, size = [], [], [], [], []
    for _ in range(2):
        kernel.append(draw(st.integers(1, 4)))
        stride.append(draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 2)))
        pad.append(draw(st.integers(0, 3)))
        fewest = max(1, dilation[-1] * (kernel[-1] - 1) + 1 - 2 * pad[-1])
        size.append(fewest + draw(st.integers(0, 6)))
    geometry = Geometry(tuple(kernel), tuple(stride), tuple(pad), tuple(dilation), group)
    return (draw(st.sampled_from([1, 2, 3])), inputs, *size), outputs, geometry


@st.composite
def poolings(draw: Any) -> tuple[tuple[int, ...], tuple[int, int], Geometry]:
    """(x's shape, y's spatial shape, geometry) of a pooling as Caffe's layer would ask for, rounded up or down."""
    axes: list[tuple[int, ...]] = []
    for _ in range(2):
        k = draw(st.integers(1, 4))
        s, p = draw(st.integers(1, 4)), draw(st.integers(0, k - 1))
        n = draw(st.integers(max(1, k - 2 * p), 9))
        spare = n + 2 * p - k
        count = (-(-spare // s) if draw(st.booleans()) else spare // s) + 1
        while count > 1 and (count - 1) * s >= n + p:  # Caffe: the last window starts inside the image
            count -= 1
        axes.append((k, s, p, n, count))
    kernel, stride, pad, size, out = zip(*axes, strict=True)
    geometry = Geometry(kernel, stride, pad, (1, 1))
    return (draw(st.sampled_from([1, 2])), draw(CHANNELS), *size), out, geometry


@st.composite
def shapes_and_axes(draw: Any) -> tuple[tuple[int, ...], int, int]:
    """(shape, axis, number of axes) for `Channel` arguments."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=5)))
    axis = draw(st.integers(0, len(shape) - 1))
    return shape, axis, draw(st.integers(1, len(shape) - axis))


@st.composite
def shapes_and_class_axis(draw: Any) -> tuple[tuple[int, ...], int]:
    """(shape, axis of the classes)."""
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4)))
    return shape, draw(st.integers(0, len(shape) - 1))
