"""Tiles of depthwise convolutions: which problems they suit, and that gradients keep in step with the stride."""

from __future__ import annotations

import pytest

from caffepy.backend.cuda.convolution.depthwise_tiling import MOST_WEIGHTS, suits_depthwise, tiles
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.types import Geometry


def task(
    channels: int, kernel: int, stride: int = 1, group: int = 0, outputs: int = 0,
    direction: Direction = Direction.FORWARD, sums: bool = False,
) -> Task:  # fmt: skip
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
        assert direction is not Direction.WEIGHTS or tile.channels * kernel**2 <= MOST_WEIGHTS
        if direction is Direction.DATA:
            assert tile.rows % stride == tile.columns % stride == 0
