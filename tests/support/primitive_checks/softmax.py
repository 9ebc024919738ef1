"""Softmax, its loss, label smoothing and ranks of labels."""

from __future__ import annotations

from typing import Any

import backend_oracle as oracle
import numpy as np
import pytest
from backend_arrays import close, dirty, normal, to_device
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend
from primitive_checks.strategies import often, shapes_and_class_axis


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
    np.testing.assert_allclose(backend.to_host(dx), expected, rtol=0, atol=1e-5 * scale)


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
    terms = 0.2 * (1 / shape[axis] - onehot) * -np.log(p) * counts
    # The terms have both signs, so the sum may be much smaller than what is rounded.
    tolerance = 1e-6 * (3 + np.abs(terms).sum())
    np.testing.assert_allclose(backend.to_host(totals), [3 + terms.sum(), 7], rtol=0, atol=tolerance)
    dx = normal(2, shape)
    for divisor, factor in ((None, 0.5), (totals, 0.5 / 7)):
        found = to_device(backend, dx)
        backend.smooth_loss_backward(on_labels, found, divisor, axis, ignore_label, 0.5)
        close(backend.to_host(found), dx + (onehot - 1 / shape[axis]) * factor * counts)


MANY_BLOCKS = [(256, 1000), (4, 21, 40, 50)]


@often
@given(case=shapes_and_class_axis())
def test_softmax(backend: Backend, case: tuple[tuple[int, ...], int]) -> None:
    check_softmax(backend, *case)


@pytest.mark.parametrize("shape", MANY_BLOCKS)
def test_softmax_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    check_softmax(backend, shape, 1)


@often
@given(case=shapes_and_class_axis(), ignore=st.sampled_from([None, 0, 1, 255]), valid=st.booleans())
def test_softmax_loss(backend: Backend, case: tuple[tuple[int, ...], int], ignore: int | None, valid: bool) -> None:
    check_softmax_loss(backend, *case, ignore, valid)


@pytest.mark.parametrize("shape", MANY_BLOCKS)
def test_softmax_loss_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    check_softmax_loss(backend, shape, 1, 3, True)


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 5), 1), ((2, 4, 3, 3), 1), ((2, 3, 4), 2), ((64, 1000), 1), ((4, 9000), 1)]
)
def test_one_score_that_is_nan_makes_the_loss_nan(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    scores, labels = normal(1, shape), np.zeros(shape[:axis] + shape[axis + 1 :], np.float32)
    scores[(0,) * len(shape)] = np.nan
    totals, bad, probabilities = dirty(backend, (2,)), to_device(backend, [-1], "int32"), dirty(backend, shape)
    backend.softmax_loss_forward(
        to_device(backend, scores), to_device(backend, labels), probabilities, totals, bad, axis, None
    )
    assert np.isnan(backend.to_host(totals)[0])
    assert backend.to_host(totals)[1] == labels.size


@often
@given(case=shapes_and_class_axis(), ignore=st.sampled_from([None, 0]))
def test_label_smoothing(backend: Backend, case: tuple[tuple[int, ...], int], ignore: int | None) -> None:
    check_smoothing(backend, *case, ignore)


@pytest.mark.parametrize("shape", MANY_BLOCKS)
def test_label_smoothing_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    check_smoothing(backend, shape, 1, 3)


@often
@given(case=shapes_and_class_axis())
def test_labels_that_are_no_class(backend: Backend, case: tuple[tuple[int, ...], int]) -> None:
    check_bad_labels(backend, *case)


@often
@given(case=shapes_and_class_axis())
def test_label_ranks(backend: Backend, case: tuple[tuple[int, ...], int]) -> None:
    check_label_ranks(backend, *case)


@pytest.mark.parametrize("shape", MANY_BLOCKS)
def test_label_ranks_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    check_label_ranks(backend, shape, 1)
