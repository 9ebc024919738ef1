"""Tilings of small convolutions: every one fits a block, and together the blocks cover the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.types import Geometry

if TYPE_CHECKING:
    from caffepy.backend.cuda.convolution.implicit_gemm import SHARED_LIMIT, shape_of, tilings


@pytest.fixture(scope="module", autouse=True)
def _imports(cupy_or_mock: None) -> None:
    """CuPy need not be installed."""
    global SHARED_LIMIT, shape_of, tilings
    from caffepy.backend.cuda.convolution.implicit_gemm import SHARED_LIMIT, shape_of, tilings


MULTIPROCESSORS = 132


def problem(x: tuple[int, ...], outputs: int, kernel: int, stride: int = 1, pad: int = 0, dilation: int = 1) -> Problem:
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (pad,) * 2, (dilation,) * 2)
    return Problem(x, (outputs, x[1], kernel, kernel), geometry)


PROBLEMS = {
    "LeNet conv1": problem((64, 1, 28, 28), 20, 5),
    "LeNet conv2": problem((64, 20, 12, 12), 50, 5),
    "cifar10 conv1": problem((100, 3, 32, 32), 32, 5, pad=2),
    "cifar10 conv2": problem((100, 32, 16, 16), 32, 5, pad=2),
    "cifar10 conv3": problem((100, 32, 8, 8), 64, 5, pad=2),
    "large window": problem((4, 16, 26, 26), 16, 15, pad=7),
    "large window, dilated": problem((2, 5, 40, 30), 20, 9, stride=2, dilation=3),
    "one place": problem((1, 1, 1, 1), 1, 1),
    "odd": problem((3, 33, 7, 5), 7, 3, pad=2, dilation=2),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("direction", Direction)
def test_every_tiling_fits_and_covers(name: str, direction: Direction) -> None:
    shape = shape_of(Task(PROBLEMS[name], direction))
    weights = direction is Direction.WEIGHTS
    layouts = tilings(shape, weights, MULTIPROCESSORS)
    assert layouts
    assert len({layout.tiling.name for layout in layouts}) == len({layout.tiling for layout in layouts})
    for layout in layouts:
        t = layout.tiling
        assert 4 * layout.words <= SHARED_LIMIT
        assert 4 <= t.warps <= 16
        assert t.images == 1 or t.rows == shape.out[0], "several images are taken whole"
        assert layout.pixel >= shape.channels
        if weights:
            assert t.tiles_m * 16 * layout.grid[2] >= shape.outputs
            assert layout.columns * layout.grid[1] >= shape.depth
            assert layout.grid[0] <= layout.pieces
        else:
            assert t.warps_m * t.tiles_m * 16 >= layout.pixels
            assert layout.columns * layout.grid[1] >= shape.outputs
        assert layout.pieces * t.images * t.rows >= shape.images * shape.out[0]


def test_a_gradient_to_data_is_a_convolution_of_dy() -> None:
    shape = shape_of(Task(problem((2, 3, 9, 8), 5, 3, pad=1), Direction.DATA))
    assert (shape.channels, shape.outputs, shape.image, shape.out) == (5, 3, (9, 8), (9, 8))
    assert shape.pad == (1, 1) and shape.flipped


def test_the_model_prefers_to_use_all_multiprocessors() -> None:
    best = tilings(shape_of(Task(PROBLEMS["LeNet conv1"], Direction.FORWARD)), False, MULTIPROCESSORS)[0]
    assert best.grid[0] * best.grid[1] >= MULTIPROCESSORS


@pytest.mark.parametrize("name", ["large window", "large window, dilated", "cifar10 conv2"])
def test_blocks_of_weights_have_the_rows_of_the_window_that_their_columns_need(name: str) -> None:
    shape = shape_of(Task(PROBLEMS[name], Direction.WEIGHTS))
    row = shape.kernel[1] * shape.channels
    fewest = shape.kernel[0]
    for layout in tilings(shape, True, MULTIPROCESSORS):
        fewest = min(fewest, layout.kernel_rows)
        for block in range(layout.grid[1]):
            columns = range(block * layout.columns, min((block + 1) * layout.columns, shape.depth))
            top = columns[0] // row if layout.kernel_rows < shape.kernel[0] else 0
            assert top + layout.kernel_rows > columns[-1] // row
    assert (fewest < shape.kernel[0]) is name.startswith("large")
