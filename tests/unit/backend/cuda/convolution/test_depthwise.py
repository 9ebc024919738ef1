"""Tiles of depthwise convolutions: which problems they suit, and that gradients keep in step with the stride."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as given_that
from hypothesis import strategies as some

from caffepy.backend.cuda.convolution.problem import (
    MAX_WEIGHTS,
    START_STEPS,
    Direction,
    Problem,
    Task,
    always_within,
    source_columns,
    strip_rows,
    suits_depthwise,
    tiles,
    walk_of,
)
from caffepy.backend.types import Geometry


def task(
    channels: int,
    kernel: int,
    stride: int = 1,
    group: int = 0,
    outputs: int = 0,
    direction: Direction = Direction.FORWARD,
    sums: bool = False,
) -> Task:
    group = group or channels
    outputs = outputs or channels
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1), group)
    problem = Problem((2, channels, 14, 14), (outputs, channels // group, kernel, kernel), geometry)
    return Task(problem, direction, sums=sums)


@pytest.mark.parametrize(
    "given, suited",
    [
        (task(32, 3), True),
        (task(7, 5, 2), True),
        (task(32, 3, group=16), False),
        (task(32, 3, outputs=64), False),
        (task(32, 1), False),
        (task(32, 9), False),
        (task(32, 3, sums=True), True),
    ],
)
def test_which_problems_they_suit(given: Task, suited: bool) -> None:
    assert suits_depthwise(given) == suited


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", [2, 3, 5, 7])
@pytest.mark.parametrize("channels", [1, 6, 7, 32, 200])
def test_tiles(channels: int, kernel: int, stride: int, direction: Direction) -> None:
    found = tiles(task(channels, kernel, stride, direction=direction))
    assert found and len({tile.name for tile in found}) == len(found)
    for tile in found:
        assert channels % tile.channels == 0
        assert direction is not Direction.WEIGHTS or tile.channels * kernel**2 <= MAX_WEIGHTS
        if direction is Direction.DATA:
            assert tile.rows % stride == tile.columns % stride == 0


@pytest.mark.parametrize(
    "height, step, others, at_once, rows",
    [
        (112, 1, 100, 100, 112),  # every thread takes one whole column of strips
        (112, 1, 100, 200, 56),
        (112, 1, 100, 20_000, 1),
        (14, 2, 100, 200, 8),  # a multiple of a step's rows
        (13, 2, 1000, 10, 14),
        (1, 2, 5, 5, 2),
    ],
)
def test_strips_keep_all_threads_busy(height: int, step: int, others: int, at_once: int, rows: int) -> None:
    assert strip_rows(height, step, others, at_once) == rows


@given_that(some.integers(1, 300), some.sampled_from([1, 2, 4]), some.integers(1, 5000), some.integers(1, 5000))
def test_no_other_strips_are_done_earlier(height: int, step: int, others: int, at_once: int) -> None:
    def time(rows: int) -> int:
        return -(-others * -(-height // rows) // at_once) * (rows // step + START_STEPS)

    chosen = strip_rows(height, step, others, at_once)
    assert chosen % step == 0 < chosen < height + step
    assert time(chosen) == min(time(rows) for rows in range(step, height + step, step))


@given_that(
    some.integers(1, 5),
    some.integers(1, 3),
    some.integers(0, 4),
    some.integers(1, 3),
    some.integers(1, 4),
    some.integers(1, 20),
    some.booleans(),
)
def test_the_columns_of_the_source_that_a_tile_needs(
    kernel: int, stride: int, pad: int, dilation: int, tile: int, width: int, data: bool
) -> None:
    """Tried out for tiles of dx at multiples of the stride and tiles of y anywhere."""
    geometry = Geometry((1, kernel), (1, stride), (0, pad), (1, dilation), 2)
    direction = Direction.DATA if data else Direction.FORWARD
    problem = Task(Problem((1, 2, 1, 60), (2, 1, 1, kernel), geometry), direction)
    columns = tile * stride if data else tile
    first, number = source_columns(problem, columns)
    left = columns * width
    needed = set()
    for result in range(left, left + columns):
        for k in range(kernel):
            if not data:
                needed.add(result * stride + k * dilation - pad)
            elif (result + pad - k * dilation) % stride == 0:
                needed.add((result + pad - k * dilation) // stride)
    begin = (left // stride if data else left * stride) + first
    assert needed <= set(range(begin, begin + number))
    assert not needed or {begin, begin + number - 1} <= needed or (data and stride > 1) or kernel == 1


def test_columns_that_always_lie_within_the_image() -> None:
    assert always_within(range(0, 12, 4), 4, 12) == 0b1111
    assert always_within(range(0, 10, 4), 4, 10) == 0b0011
    assert always_within(range(-1, 11, 4), 6, 12) == 0b011110
    assert always_within([-3, 5], 4, 6) == 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("channels", [1, 6, 7, 32])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.DATA])
def test_walks(channels: int, kernel: int, stride: int, dtype: str, direction: Direction) -> None:
    problem = replace(task(channels, kernel, stride).problem, dtype=dtype)
    walk = walk_of(Task(problem, direction))
    if kernel == 5:
        assert walk is None
        return
    assert walk is not None and channels % walk.tile.channels == 0
    assert walk.name not in {tile.name for tile in tiles(Task(problem, direction))}
    if direction is Direction.DATA:
        assert walk.tile.rows % stride == walk.tile.columns % stride == 0


def test_columns_of_a_walk_are_bits() -> None:
    for dilation, walks in ((8, True), (9, False)):
        geometry = Geometry((3, 3), (4, 4), (0, 0), (1, dilation), 6)
        given = Task(Problem((1, 6, 40, 40), (6, 1, 3, 3), geometry), Direction.FORWARD)
        walk = walk_of(given)
        assert (walk is not None) == walks
        assert walk is None or source_columns(given, walk.tile.columns)[1] <= 32
