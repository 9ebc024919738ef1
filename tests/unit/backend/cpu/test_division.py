"""The output of convolutions cut into parts for all threads, and copies of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.convolution.correlation import Division, divide, longest_share
from caffepy.backend.cpu.dense import BLOCK, even_block
from caffepy.backend.cpu.gemm import ROWS, Panels
from caffepy.backend.cpu.jit.vector import WIDTH


@pytest.mark.parametrize(
    ("pixels", "columns", "depth"),
    [(3136, 128, 64), (784, 32, 256), (784, 256, 128), (196, 48, 384), (196, 192, 48), (196, 512, 512), (49, 999, 999)],
)  # fmt: skip
def test_two_threads_have_as_much_to_do(pixels: int, columns: int, depth: int) -> None:
    panels = Panels(depth, columns, pixels)
    alone = longest_share(Division(pixels, 1, 1), panels, pixels, 1, 1)
    share = longest_share(divide(panels, pixels, 2, 1), panels, pixels, 2, 1)
    assert share < 1.15 * alone / 2


@settings(max_examples=60, derandomize=True)
@given(
    pixels=st.integers(1, 2000), columns=st.integers(1, 600), threads=st.integers(1, 9), images=st.integers(1, 40)
)  # fmt: skip
def test_a_division_covers_all_pixels_and_begins_with_whole_tiles(
    pixels: int, columns: int, threads: int, images: int
) -> None:
    panels = Panels(9, columns, pixels)
    block, blocks, parts = divide(panels, pixels, threads, images)
    assert (blocks - 1) * block < pixels <= blocks * block
    assert all(block % ROWS[vectors] == 0 for vectors in panels.entries[:, 0].tolist())
    assert 1 <= parts <= panels.count


@settings(max_examples=15, derandomize=True)
@given(
    size=st.integers(3, 30), channels=st.integers(1, 40), outputs=st.integers(1, 130), kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
)  # fmt: skip
def test_convolutions_give_the_same_bits_with_any_number_of_threads(
    size: int, channels: int, outputs: int, kernel: int, stride: int
) -> None:
    random = np.random.default_rng(1)
    values = [random.standard_normal(s) for s in ((1, channels, size, size), (outputs, channels, kernel, kernel))]
    results = []
    for threads in (1, 2, 3, 5):
        backend = CpuBackend(threads)
        x, weights = (backend.zeros(value.shape) for value in values)
        x[...], weights[...] = values
        out = (size + 2 * (kernel // 2) - kernel) // stride + 1
        y = backend.zeros((1, outputs, out, out))
        geometry = Geometry((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1))
        plan = backend.plan_convolution(x.shape, weights.shape, geometry)
        backend.keep_weights(plan, weights)
        plan.forward(x, weights, None, y)
        results.append(y)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def _layout(values: Any, kind: str) -> Any:
    """An array with these values: planes, pixels, a part of more channels, every second column, or mirrored rows."""
    n, c, h, w = values.shape
    array = {
        "planes": lambda: np.zeros((n, c, h, w), np.float32),
        "pixels": lambda: np.zeros((n, h, w, c), np.float32).transpose(0, 3, 1, 2),
        "part": lambda: np.zeros((n, h, w, c + 5), np.float32).transpose(0, 3, 1, 2)[:, 2 : 2 + c],
        "columns": lambda: np.zeros((n, c, h, 2 * w), np.float32)[..., ::2],
        "mirrored": lambda: np.zeros((n, h, w, c), np.float32)[:, :, ::-1].transpose(0, 3, 1, 2),
    }[kind]()
    array[...] = values
    return array


KINDS = st.sampled_from(["planes", "pixels", "part", "columns", "mirrored"])


@settings(max_examples=60, derandomize=True)
@given(shape=st.tuples(*[st.integers(0, 3), *[st.integers(1, 20)] * 3]), source=KINDS, target=KINDS)
def test_images_are_copied_whatever_their_order_in_memory(
    shape: tuple[int, int, int, int], source: str, target: str
) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    result = _layout(np.zeros(shape, np.float32), target)
    whole = result if result.base is None else result.base
    CpuBackend(3).copy(_layout(values, source), result)
    np.testing.assert_array_equal(result, values)
    assert np.count_nonzero(whole) == np.count_nonzero(values)


def test_a_copy_onto_itself_with_a_shift_is_numpys() -> None:
    array = np.arange(48, dtype=np.float32).reshape(1, 1, 6, 8)
    expected = array[:, :, :-1].copy()
    CpuBackend(2).copy(array[:, :, :-1], array[:, :, 1:])
    np.testing.assert_array_equal(array[:, :, 1:], expected)


def test_one_image_for_all_is_numpys() -> None:
    target = np.zeros((3, 2, 4, 4), np.float32)
    CpuBackend(2).copy(np.full((1, 2, 1, 1), 4, np.float32), target)
    assert (target == 4).all()


@pytest.mark.parametrize("columns", [250, 500, 784, 1000, 4096, 9216])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_columns_of_a_product_are_dealt_evenly(columns: int, threads: int) -> None:
    panel = 2 * WIDTH
    block = even_block(columns, panel, BLOCK, threads)
    share = -(-columns // (block * threads)) * block
    assert block % panel == 0
    assert block <= BLOCK + 2 * panel
    assert share <= max(panel, 1.15 * columns / threads + panel / 2)
