"""Where Channel arguments are found in memory: checked by brute force; needs no GPU."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from primitive_checks.strategies import shapes_and_axes

from caffepy.backend.cuda.index_arithmetic import Period, StridedAxis, collapse, find_period, widest
from caffepy.backend.types import memory_axes

ENDS = ("source", "destination")


def in_memory_order(array: np.ndarray) -> np.ndarray:
    """The elements as they lie in the backend's memory."""
    return array.transpose(memory_axes(array.ndim)).reshape(-1)


@settings(max_examples=200)
@given(case=shapes_and_axes())
def test_a_period_finds_the_element_that_broadcasting_finds(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, axis, axes = case
    small = shape[axis : axis + axes]
    period = find_period(shape, small, axis)
    if period is None:
        return
    values = np.arange(np.prod(small)).reshape(small)
    spread = values.reshape((1,) * axis + small + (1,) * (len(shape) - axis - axes))
    wanted = in_memory_order(np.broadcast_to(spread, shape))
    numbers = np.arange(np.prod(shape))
    image = period.outer * period.size * period.inner
    places = numbers // image * period.size + numbers // period.inner % period.size
    assert np.array_equal(in_memory_order(values)[places], wanted)
    assert image * period.images == np.prod(shape)


def test_common_cases_have_a_period() -> None:
    assert find_period((8, 3, 5, 7), (3,), 1) == Period(8 * 5 * 7, 3, 1)
    assert find_period((8, 3), (3,), 1) == Period(8, 3, 1)
    assert find_period((8, 3, 5), (3,), 1) == Period(8, 3, 5)
    assert find_period((8, 3, 5, 7, 2), (3,), 1) == Period(8 * 5 * 7 * 2, 3, 1)
    assert find_period((8, 3, 5, 7), (8,), 0) == Period(1, 8, 105)
    assert find_period((8, 3, 5, 7), (), 1) == Period(840, 1, 1)


def test_channels_of_images_have_a_period_in_each_image() -> None:
    assert find_period((8, 3, 5, 7), (8, 3), 0) == Period(35, 3, 1, 8)
    assert find_period((8, 3, 5, 7, 2), (8, 3, 1, 1, 1), 0) == Period(70, 3, 1, 8)
    assert find_period((8, 3, 1, 1), (8, 3), 0) == Period(1, 24, 1)


def test_channels_before_places_have_none_in_channels_last_memory() -> None:
    assert find_period((8, 3, 5, 7), (3, 5, 7), 1) is None
    assert find_period((8, 3, 5, 7), (8, 3, 5), 0) is None


@settings(max_examples=200)
@given(case=shapes_and_axes(), order=st.randoms(use_true_random=False))
def test_collapsed_axes_walk_along_both_arrays(case: tuple[tuple[int, ...], int, int], order: random.Random) -> None:
    shape = case[0]
    source = np.arange(np.prod(shape)).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    wide = np.zeros([shape[a] + 1 for a in axes])
    destination = wide[tuple(slice(shape[a]) for a in axes)].transpose(np.argsort(axes))
    assert destination.shape == shape
    steps = [tuple(s // array.itemsize for s in array.strides) for array in (source, destination)]
    flat = wide.reshape(-1)
    joined = collapse(shape, steps[0], steps[1])
    for place in np.ndindex(*(axis.size for axis in joined)):
        at = [sum(i * getattr(axis, end) for i, axis in zip(place, joined, strict=True)) for end in ENDS]
        flat[at[1]] = source.reshape(-1)[at[0]]
    assert np.array_equal(destination, source)


def test_slices_of_channels_last_arrays_have_two_axes() -> None:
    whole, part = (7 * 5 * 64, 1, 5 * 64, 64), (7 * 5 * 16, 1, 5 * 16, 16)
    assert collapse((8, 16, 7, 5), part, whole) == [StridedAxis(8 * 7 * 5, 16, 64), StridedAxis(16, 1, 1)]
    assert collapse((8, 16, 7, 5), part, part) == [StridedAxis(8 * 7 * 5 * 16, 1, 1)]


def test_widest() -> None:
    assert widest([64, 8, 24], 8) == 8 and widest([64, 12], 8) == 4 and widest([7], 8) == 1 and widest([], 4) == 4
