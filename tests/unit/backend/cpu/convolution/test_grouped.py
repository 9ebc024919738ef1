"""Convolutions on the CPU that go other ways than by tiles: narrow groups, other numbers of axes, matrix products."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from primitive_checks.convolution import check_convolution

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.grouped import GroupedConvolution
from caffepy.backend.cpu.convolution.pointwise import ProductConvolution
from caffepy.backend.cpu.convolution.simd_groups import (
    Row,
    SimdGroups,
    pixel_kernel,
    row_kernel,
    row_tap_kernel,
    tap_kernel,
)
from caffepy.backend.cpu.jit.vector import WIDTH

BACKEND = create_backend(None, 2)
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))
WIDTHS = [(1, 1), (1, 2), (4, 4), (3, 5), (8, 1)]
"""Channels of a group of the output and of the image."""


def planned(x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> Any:
    weights = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
    return BACKEND.plan_convolution(x_shape, weights, geometry)


@pytest.mark.parametrize(("made", "read"), WIDTHS)
@settings(max_examples=6, derandomize=True)
@given(
    groups=st.integers(2, 19), images=st.integers(1, 3), extra=PAIR, kernel=PAIR, stride=PAIR, pad=PAIR, dilation=PAIR
)
def test_narrow_groups(
    made: int,
    read: int,
    groups: int,
    images: int,
    extra: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    pad = (pad[0] - 1, pad[1] - 1)
    size = tuple(max(1, d * (k - 1) + e + 2 - 2 * p) for k, d, e, p in zip(kernel, dilation, extra, pad, strict=True))
    case = (images, groups * read, *size), groups * made, Geometry(kernel, stride, pad, dilation, groups)
    assert isinstance(planned(*case), GroupedConvolution)
    check_convolution(BACKEND, *case)


@pytest.mark.parametrize("width", [5, 6, 11, 16, 21, 33])
def test_rows_of_all_lengths(width: int) -> None:
    """Tiles of eight, four and one pixel cover each of them."""
    check_convolution(BACKEND, (2, 18, 4, width), 18, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 18))


@settings(max_examples=8, derandomize=True)
@given(
    channels=st.sampled_from([WIDTH, 2 * WIDTH + 3, 5 * WIDTH]),
    height=st.integers(1, 9),
    width=st.integers(8, 40),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 3),
    pad=st.integers(0, 3),
    images=st.integers(1, 2),
)
def test_depthwise_rows(
    channels: int, height: int, width: int, stride: int, dilation: int, pad: int, images: int
) -> None:
    """Tiles fetch what the next vector, tile and row read, whatever the padding leaves of their windows."""
    size = max(1, 2 * dilation + height - 2 * pad), width + 2 * dilation
    geometry = Geometry((3, 3), (stride, stride), (pad, pad), (dilation, dilation), channels)
    check_convolution(BACKEND, (images, channels, *size), channels, geometry)


@pytest.mark.parametrize("channels", [2, 3, 4])
@settings(max_examples=8, derandomize=True)
@given(
    height=st.integers(1, 6), extra=st.integers(0, 150), images=st.integers(1, 3), kernel=PAIR, pad=PAIR, dilation=PAIR
)
def test_depthwise_of_few_channels(
    channels: int,
    height: int,
    extra: int,
    images: int,
    kernel: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    reach = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    pad = (min(pad[0] - 1, reach[0]), min(pad[1] - 1, reach[1]))
    size = max(1, reach[0] + height - 2 * pad[0]), WIDTH + reach[1] + extra
    geometry = Geometry(kernel, (1, 1), pad, dilation, channels)
    check_convolution(BACKEND, (images, channels, *size), channels, geometry)


def test_depthwise_of_few_channels_not_finite() -> None:
    """NaN and infinity reach the pixels whose windows have them, and no other row or image."""
    x_shape, geometry = (3, 3, 4, 40), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 3)
    x, y, weights = BACKEND.zeros(x_shape), BACKEND.zeros(x_shape), BACKEND.zeros((3, 1, 3, 3))
    weights[...] = 1
    x[1, 1, 2, 0], x[1, 2, 0, 39] = np.nan, np.inf
    expected = np.zeros(x_shape)
    expected[1, 1, 1:4, :2], expected[1, 2, :2, 38:] = np.nan, np.inf
    plan = planned(x_shape, 3, geometry)
    for run in (lambda: plan.forward(x, weights, None, y), lambda: plan.backward_data(x, weights, y)):
        y[...] = 77
        run()
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("taps", [9, 31, 33])
def test_long_rows_of_taps(taps: int) -> None:
    """Rows of up to 32 taps share what they read; pixels beyond an edge of the image count for nothing."""
    geometry = Geometry((2, taps), (1, 1), (1, taps // 2), (1, 1), 20)
    check_convolution(BACKEND, (1, 20, 3, 37), 20, geometry)


@pytest.mark.parametrize(("outputs", "channels", "groups"), [(6, 48, 3), (48, 48, 3), (4, 4, 1)])
def test_wide_groups_go_by_tiles(outputs: int, channels: int, groups: int) -> None:
    plan = planned((1, channels, 5, 5), outputs, Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups))
    assert type(plan) is TileConvolution


def test_other_axes_in_parts_of_the_batch() -> None:
    check_convolution(BACKEND, (5, 20, 4000), 20, Geometry((3,), (1,), (1,), (1,), 20))
    check_convolution(BACKEND, (5, 20, 9000), 24, Geometry((3,), (2,), (1,), (1,)))


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation"), [(1, 1, 0, 1), (2, 1, 5, 5), (2, 1, 40, 40), (2, 1, 0, 3), (2, 1, 1, 60)]
)
def test_weights_of_short_kernels_over_one_axis(kernel: int, stride: int, pad: int, dilation: int) -> None:
    """They are products of images as they lie, also where a tap lies beside the image."""
    check_convolution(BACKEND, (3, 19, 2000), 33, Geometry((kernel,), (stride,), (pad,), (dilation,)))


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("width", [4, 7, 13, 14, 16, 21, 28])
def test_rows_of_taps(dilation: int, width: int) -> None:
    """Tiles of pixels that share what they read, at both edges of a row and within it."""
    geometry = Geometry((3, 5), (1, 1), (1, 2 * dilation), (1, dilation), 34)
    check_convolution(BACKEND, (2, 34, 5, width), 34, geometry)


def test_other_axes_write_no_columns() -> None:
    """27 elements of each window, written out, would be 27 times the image."""
    x_shape, geometry = (1, 8, 16, 24, 24), Geometry((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    x, y, weights = BACKEND.zeros(x_shape), BACKEND.zeros(x_shape), BACKEND.zeros((8, 8, 3, 3, 3))

    def all_passes() -> None:
        plan = create_backend(None, 2).plan_convolution(x_shape, weights.shape, geometry)
        plan.forward(x, weights, None, y)
        plan.backward_data(y, weights, x)
        plan.backward_weights(x, y, weights, False)

    all_passes()  # what compiling the kernels takes is not counted
    tracemalloc.start()
    try:
        all_passes()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * x.nbytes


@pytest.mark.parametrize(
    ("x_shape", "kernel", "stride", "pad", "product"),
    [
        ((3, 40, 5, 7), (5, 7), (1, 1), (0, 0), True),
        ((1, 40, 6, 6), (1, 1), (1, 1), (0, 0), True),
        ((8, 40, 1, 1), (1, 1), (1, 1), (0, 0), True),
        ((64, 40, 6, 6), (1, 1), (1, 1), (0, 0), False),  # more pixels than outputs
        ((1, 40, 6, 6), (1, 1), (2, 2), (0, 0), False),
        ((1, 40, 6, 6), (6, 6), (1, 1), (1, 1), False),
        ((1, 40, 6, 6), (6, 5), (1, 1), (0, 0), False),
    ],
)
def test_what_is_computed_as_one_product(
    x_shape: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int], product: bool
) -> None:
    plan = planned(x_shape, 50, Geometry(kernel, stride, pad, (1, 1)))
    assert isinstance(plan, ProductConvolution) == product


def test_machine_code_for_other_groups_has_other_names() -> None:
    """Processes keep it side by side; a process that links all of it must not take one for another."""
    kernels = [make(SimdGroups(*widths)) for make in (pixel_kernel, tap_kernel) for widths in WIDTHS]
    kernels += [row_kernel(SimdGroups(1, 1), row, high) for row in (Row(3, 1, 1), Row(3, 1, 2)) for high in (7, 8)]
    kernels += [row_tap_kernel(SimdGroups(1, 1), row, rows) for row in (Row(3, 1, 1), Row(3, 2, 1)) for rows in (1, 3)]
    assert len({kernel.name for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize(
    ("x_shape", "outputs", "geometry"),
    [
        ((2, 3, 19, 23), 21, Geometry((7, 7), (2, 2), (3, 3), (1, 1))),
        ((3, 1, 9, 11), 8, Geometry((5, 4), (1, 1), (0, 2), (1, 1))),
        ((2, 2, 15, 13), 5, Geometry((3, 3), (4, 5), (1, 0), (2, 2))),
        ((1, 3, 6, 9, 10), 4, Geometry((3, 2, 5), (1, 2, 2), (1, 0, 2), (1, 1, 1))),
        ((2, 1, 30), 6, Geometry((9,), (3,), (4,), (1,))),
    ],
)
def test_images_of_few_channels(x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
    check_convolution(BACKEND, x_shape, outputs, geometry)


@settings(max_examples=12, deadline=None, derandomize=True)  # each compiles kernels of its own
@given(
    images=st.integers(1, 3),
    channels=st.integers(1, 20),
    many=st.integers(1, 3),
    out=st.integers(1, 50),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 3),
    pad=st.integers(0, 5),
    dilation=st.integers(1, 4),
)
def test_depthwise_over_one_axis(
    images: int, channels: int, many: int, out: int, kernel: int, stride: int, pad: int, dilation: int
) -> None:
    """Padding may be wider than the kernel."""
    width = max(stride, (out - 1) * stride + dilation * (kernel - 1) + 1 - 2 * pad)
    geometry = Geometry((kernel,), (stride,), (pad,), (dilation,), channels)
    check_convolution(BACKEND, (images, channels, width), channels * many, geometry)
