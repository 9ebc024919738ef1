"""Where Channel arguments are found in memory: checked by brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from primitive_checks.strategies import repeats

from caffepy.backend.period import Period, find_period
from caffepy.backend.types import memory_axes


def in_memory_order(array: np.ndarray) -> np.ndarray:
    """The elements as they lie in the backend's memory."""
    return array.transpose(memory_axes(array.ndim)).reshape(-1)


@settings(max_examples=200)
@given(case=repeats())
def test_a_period_finds_the_element_that_broadcasting_finds(
    case: tuple[tuple[int, ...], int, list[tuple[int, ...]]],
) -> None:
    shape, axis, (small, *_) = case
    period = find_period(shape, small, axis)
    if period is None:
        return
    values = np.arange(np.prod(small)).reshape(small)
    spread = values.reshape((1,) * axis + small + (1,) * (len(shape) - axis - len(small)))
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
    assert find_period((8, 3, 5, 7), (8, 1, 5, 7), 0) == Period(1, 8 * 5 * 7, 3)
    assert find_period((8, 3, 5, 7), (1, 3, 1, 1), 0) == Period(8 * 5 * 7, 3, 1)


def test_channels_of_images_have_a_period_in_each_image() -> None:
    assert find_period((8, 3, 5, 7), (8, 3), 0) == Period(35, 3, 1, 8)
    assert find_period((8, 3, 5, 7, 2), (8, 3, 1, 1, 1), 0) == Period(70, 3, 1, 8)
    assert find_period((8, 3, 1, 1), (8, 3), 0) == Period(1, 24, 1)


def test_channels_before_places_have_none_in_channels_last_memory() -> None:
    assert find_period((8, 3, 5, 7), (3, 5, 7), 1) is None
    assert find_period((8, 3, 5, 7), (8, 3, 5), 0) is None
