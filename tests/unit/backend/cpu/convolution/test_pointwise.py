"""Products of rows and packed weights, whose tiles leave no row over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.convolution.pointwise import HEIGHTS, PixelConvolution, PixelProduct, block_of, cut
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.microkernel import WeightPacking, extended

ONE_BY_ONE = Geometry((1, 1), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("rows", [*range(1, 150), 361, 784, 3136, 12544, 100003])
def test_tiles_cover_each_row_once(rows: int) -> None:
    high, many, rest, tiles = cut(rows)
    others = rest.array[: 2 * (tiles - many)].reshape(-1, 2)
    assert high in HEIGHTS and set(others[:, 1]) <= set(HEIGHTS)
    assert others[0, 0] == high * many and others[:, 1].sum() + high * many == rows
    np.testing.assert_array_equal(others[1:, 0], others[:-1].sum(axis=1))


@pytest.mark.parametrize("rows", [49, 196, 784, 3136, 12544])
def test_no_tile_is_low_for_the_usual_images(rows: int) -> None:
    """An image of 7 x 7 is seven tiles of vectors of 16, not thirteen of four rows."""
    least = {16: 8, 8: 6, 4: 6}[WIDTH]
    assert cut(rows).tiles <= -(-rows // least) + 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_of_large_images_can_be_shared_out(threads: int) -> None:
    for rows in (196, 784, 12544):
        tiles = cut(rows).tiles
        blocks = -(-tiles // block_of(tiles, rows, 512, threads))
        assert blocks >= threads and (blocks % threads == 0 or blocks > 8 * threads)
    assert block_of(7, 49, 512, threads) == 7  # panels are shared out


class Case:
    """Rows, weights, and what is added."""

    def __init__(self, rows: int, depth: int, columns: int) -> None:
        generator = np.random.default_rng(rows + depth + columns)
        shapes = (rows, depth), (columns, depth), (columns,), (rows, columns)
        self.x, self.weights, self.start, self.addend = (generator.standard_normal(s).astype("f") for s in shapes)
        self.plan = PixelProduct(depth, columns, WeightPacking(extended(np.arange(depth)), depth))
        self.packed = np.full(self.plan.packed_size, np.nan, np.float32)
        self.plan.pack(1, self.weights, self.packed)

    def run(self, threads: int, adds: bool, relu: bool, in_place: bool = False) -> Any:
        guard = 64
        memory = np.full(self.addend.size + 2 * guard, 7, np.float32)
        y = memory[guard:-guard].reshape(self.addend.shape)
        y[...] = self.addend if in_place else np.nan
        addend = y if in_place else self.addend if adds else None
        self.plan.run(threads, len(self.x), self.x, self.packed, self.start, y, addend, relu)
        assert (memory[:guard] == 7).all() and (memory[-guard:] == 7).all()
        return y


@settings(max_examples=60, derandomize=True)
@given(
    rows=st.one_of(st.integers(1, 70), st.integers(100, 420)),
    depth=st.integers(1, 140),
    columns=st.integers(1, 9 * WIDTH),
    adds=st.booleans(),
    relu=st.booleans(),
)
def test_products(rows: int, depth: int, columns: int, adds: bool, relu: bool) -> None:
    case = Case(rows, depth, columns)
    wanted = case.x.astype("d") @ case.weights.T.astype("d") + case.start + (case.addend if adds else 0)
    found = case.run(2, adds, relu)
    np.testing.assert_allclose(found, np.maximum(wanted, 0) if relu else wanted, atol=1e-4)
    np.testing.assert_array_equal(found, case.run(1, adds, relu))
    np.testing.assert_array_equal(found, case.run(3, adds, relu))
    if adds:
        np.testing.assert_array_equal(found, case.run(2, adds, relu, in_place=True))


def test_nan_is_not_rectified() -> None:
    case = Case(9, 5, 40)
    case.x[3] = np.nan
    found = case.run(1, adds=False, relu=True)
    assert np.isnan(found[3]).all() and not np.isnan(np.delete(found, 3, axis=0)).any()


@pytest.mark.parametrize(("x", "outputs"), [((1, 32, 12, 12), 64), ((3, 40, 7, 7), 50), ((1, 1024, 1, 1), 1)])
def test_images_are_rows_of_one_matrix(x: tuple[int, ...], outputs: int) -> None:
    backend = CpuBackend(2)
    plan = backend.plan_convolution(x, (outputs, x[1], 1, 1), ONE_BY_ONE)
    assert isinstance(plan, PixelConvolution)
    y, weights = backend.zeros((x[0], outputs, *x[2:])), backend.zeros((outputs, x[1], 1, 1))
    image = backend.zeros(x)
    generator = np.random.default_rng(1)
    image[...], weights[...] = generator.standard_normal(x), generator.standard_normal(weights.shape)
    plan.forward(image, weights, None, y)
    np.testing.assert_allclose(y, np.einsum("nchw,oc->nohw", image, weights[:, :, 0, 0]), atol=1e-3)
    back = backend.zeros(x)
    plan.backward_data(y, weights, back)
    np.testing.assert_allclose(back, np.einsum("nohw,oc->nchw", y, weights[:, :, 0, 0]), rtol=1e-4, atol=1e-2)
