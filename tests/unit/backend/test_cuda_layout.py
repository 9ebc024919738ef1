"""Where Channel arguments are found in memory: checked by brute force; needs no GPU."""

from __future__ import annotations

import numpy as np
from backend_checks import shapes_and_axes
from hypothesis import given, settings

from caffepy.backend.cuda_layout import Period, find_period, memory_axes


def in_memory_order(array: np.ndarray) -> np.ndarray:
    """The elements as they lie in the backend's memory."""
    return array.transpose(memory_axes(array.ndim)).reshape(-1)


@settings(max_examples=200, deadline=None)
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
    places = np.arange(np.prod(shape)) // period.inner % period.size
    assert np.array_equal(in_memory_order(values)[places], wanted)
    assert period.outer * period.size * period.inner == np.prod(shape)


def test_common_cases_have_a_period() -> None:
    assert find_period((8, 3, 5, 7), (3,), 1) == Period(8 * 5 * 7, 3, 1)
    assert find_period((8, 3), (3,), 1) == Period(8, 3, 1)
    assert find_period((8, 3, 5), (3,), 1) == Period(8, 3, 5)
    assert find_period((8, 3, 5, 7), (8,), 0) == Period(1, 8, 105)
    assert find_period((8, 3, 5, 7), (), 1) == Period(840, 1, 1)


def test_channels_before_places_have_none_in_channels_last_memory() -> None:
    assert find_period((8, 3, 5, 7), (3, 5, 7), 1) is None
    assert find_period((8, 3, 5, 7), (8, 3), 0) is None
