"""The output of convolutions and products, cut into parts for all threads."""

from __future__ import annotations

import numpy as np
import pytest
from backend_arrays import to_device
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.convolution.correlation import Division, divide, longest_share
from caffepy.backend.cpu.gemm import BLOCK, even_block
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.microkernel import ROWS, Panels


@pytest.mark.parametrize(
    ("pixels", "columns", "depth"),
    [(3136, 128, 64), (784, 32, 256), (784, 256, 128), (196, 48, 384), (196, 192, 48), (196, 512, 512), (49, 999, 999)],
)
def test_two_threads_have_as_much_to_do(pixels: int, columns: int, depth: int) -> None:
    panels = Panels(depth, columns, pixels)
    alone = longest_share(Division(pixels, 1, 1), panels, pixels, 1, 1)
    share = longest_share(divide(panels, pixels, 2, 1), panels, pixels, 2, 1)
    assert share < 1.15 * alone / 2


@settings(max_examples=60, derandomize=True)
@given(pixels=st.integers(1, 2000), columns=st.integers(1, 600), threads=st.integers(1, 9), images=st.integers(1, 40))
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
    size=st.integers(3, 30),
    channels=st.integers(1, 40),
    outputs=st.integers(1, 130),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
)
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


@pytest.mark.parametrize("columns", [250, 500, 784, 1000, 4096, 9216])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_columns_of_a_product_are_dealt_evenly(columns: int, threads: int) -> None:
    panel = 2 * WIDTH
    block = even_block(columns, panel, BLOCK, threads)
    share = -(-columns // (block * threads)) * block
    assert block % panel == 0
    assert block <= BLOCK + 2 * panel
    assert share <= max(panel, 1.15 * columns / threads + panel / 2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_infinite_weights_are_in_every_output_whose_window_meets_them(threads: int) -> None:
    """Beside the image they meet zeros: outputs there are NaN, or the numbers that they are without these weights."""
    backend, geometry = CpuBackend(threads), Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    x, weights = np.ones((5, 64, 15, 10), np.float32), np.ones((4, 64, 3, 3), np.float32)
    weights[:, :, 0, 0] = np.inf
    plan, y = backend.plan_convolution(x.shape, weights.shape, geometry), backend.zeros((5, 4, 15, 10))
    plan.forward(to_device(backend, x), to_device(backend, weights), None, y)
    found = backend.to_host(y)
    assert np.isinf(found[:, :, 1:, 1:]).all()
    beside = np.concatenate([found[:, :, 0].ravel(), found[:, :, :, 0].ravel()])
    assert np.isin(beside[~np.isnan(beside)], [256, 384]).all()
