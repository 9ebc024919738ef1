"""Convolutions in groups that go other ways than those of a few channels: scattered, folded, by planes, by runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import dirty, normal, to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from primitive_checks.convolution import check_convolution

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.convolution.grouped import (
    MAX_STRIDE,
    GroupedConvolution,
    one_window,
    suits_residue_dgrad,
    suits_scatter_dgrad,
)
from caffepy.backend.cpu.jit.vector import WIDTH

BACKEND = create_backend(None, 2)
ONE = (1, 1)
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


def planned(x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> Any:
    return BACKEND.plan_convolution(x_shape, (outputs, x_shape[1] // geometry.group, *geometry.kernel), geometry)


@pytest.mark.parametrize(("read", "made"), [(18, 18), (4, 33), (33, 4)])
@settings(max_examples=3, derandomize=True)
@given(groups=st.integers(2, 4), images=st.integers(1, 2), extra=PAIR, stride=PAIR, pad=PAIR, dilation=PAIR)
def test_groups_whose_pixels_are_scattered(
    read: int,
    made: int,
    groups: int,
    images: int,
    extra: tuple[int, int],
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    geometry = Geometry((3, 2), stride, (pad[0] - 1, pad[1] - 1), dilation, groups)
    size = tuple(d * (k - 1) + e + 2 for d, k, e in zip(dilation, geometry.kernel, extra, strict=True))
    plan = planned((images, groups * read, *size), groups * made, geometry)
    assert plan.shape.scattered
    check_convolution(BACKEND, (images, groups * read, *size), groups * made, geometry)


@pytest.mark.parametrize("channels", [18, 30, 33])
def test_groups_of_single_pixels(channels: int) -> None:
    """They are read where they lie, block by block, whatever is left in the last vector."""
    check_convolution(BACKEND, (2, 3 * channels, 6, 7), 3 * channels, Geometry(ONE, ONE, (0, 0), ONE, 3))


@pytest.mark.parametrize("size", [(4, 5), (13, 9), (40, 41)])
@pytest.mark.parametrize(("channels", "outputs"), [(90, 85), (165, 165)])
def test_parts_of_large_images_and_several_small_ones(channels: int, outputs: int, size: tuple[int, int]) -> None:
    """Blocks of rows, sets of images and what is left of them, groups brought together or read where they lie."""
    check_convolution(BACKEND, (5, channels, *size), outputs, Geometry((3, 3), (1, 2), ONE, ONE, 5))


@pytest.mark.parametrize(("read", "made"), [(12, 12), (16, 16), (20, 4), (24, 20), (16, 40), (8, 33)])
def test_weights_of_channels_in_fours(read: int, made: int) -> None:
    """Tiles of one vector whose rows lie together in fours."""
    for kernel, stride in (((3, 3), (1, 2)), ((1, 5), (1, 1)), ((2, 2), (2, 1))):
        check_convolution(BACKEND, (4, 3 * read, 9, 11), 3 * made, Geometry(kernel, stride, ONE, ONE, 3))


@pytest.mark.parametrize(("read", "made"), [(12, 12), (8, 33)])
def test_bands_of_large_images(read: int, made: int) -> None:
    """Parts of an image that all groups pass over before the next part."""
    check_convolution(BACKEND, (1, 3 * read, 80, 80), 3 * made, Geometry((3, 3), ONE, ONE, ONE, 3))


@pytest.mark.parametrize("channels", [4, 12, 16, 20])
def test_weights_of_a_few_outputs_in_fours(channels: int) -> None:
    """Likewise without groups: vectors along the outputs, of which a half vector or a whole one are the last."""
    for outputs in (8, 16, 20):
        check_convolution(BACKEND, (2, channels, 9, 11), outputs, Geometry((3, 3), (1, 2), ONE, ONE, 1))


def test_groups_read_no_zeros_beside_the_image() -> None:
    """Where weights are infinite, only pixels whose windows meet them inside the image are."""
    geometry, factors = Geometry((3, 3), ONE, ONE, ONE, 2), np.ones((36, 18, 3, 3), np.float32)
    factors[:, :, 0, 0] = np.inf
    plan = planned((1, 36, 4, 5), 36, geometry)
    x, on_weights = (to_device(BACKEND, a) for a in (np.ones((1, 36, 4, 5), np.float32), factors))
    y = dirty(BACKEND, (1, 36, 4, 5))
    plan.forward(x, on_weights, None, y)
    finite = np.isfinite(BACKEND.to_host(y)).all(axis=(0, 1))
    assert finite[0].all() and finite[:, 0].all() and not finite[1:, 1:].any()


@pytest.mark.parametrize("multiplier", [9, 32])
def test_multipliers(multiplier: int) -> None:
    """The gradient of the image is made for each output and added up."""
    geometry = Geometry((3, 3), (2, 1), (1, 1), ONE, 5)
    assert isinstance(planned((2, 5, 5, 8), 5 * multiplier, geometry), GroupedConvolution)
    check_convolution(BACKEND, (2, 5, 5, 8), 5 * multiplier, geometry)


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride", "pad"),
    [
        (5, (16, 24), (16, 16), (8, 8), (4, 4)),
        (19, (7, 7), (5, 3), (3, 2), (2, 1)),
        (33, (5, 6), (1, 1), (2, 2), (0, 0)),
    ],
)
def test_runs_of_pixels(
    channels: int, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> None:
    geometry = Geometry(kernel, stride, pad, ONE, channels)
    assert suits_scatter_dgrad(planned((2, channels, *size), channels, geometry).shape)
    check_convolution(BACKEND, (2, channels, *size), channels, geometry)


@pytest.mark.parametrize(
    ("x_shape", "geometry"),
    [  # planes of many channels; then wide windows whose pixels lie a power of two apart
        ((9, 140, 3, 7), Geometry((3, 3), ONE, ONE, ONE, 140)),
        ((9, 130, 4, 9), Geometry((3, 3), (2, 2), (1, 0), ONE, 130)),
        ((2, 512, 6, 7), Geometry((5, 5), ONE, (2, 2), ONE, 512)),
        ((2, 512, 9, 13), Geometry((3, 9), (1, 2), (1, 4), (2, 1), 512)),
        ((2, 512, 12, 12), Geometry((7, 4), ONE, (3, 0), (1, 2), 512)),
    ],
)
def test_depthwise_of_many_channels(x_shape: tuple[int, ...], geometry: Geometry) -> None:
    check_convolution(BACKEND, x_shape, x_shape[1], geometry)


@settings(max_examples=12, derandomize=True)  # each compiles kernels of its own
@given(
    channels=st.integers(WIDTH, 3 * WIDTH),
    stride=st.integers(2, 4),
    kernel=PAIR,
    dilation=st.integers(1, 3),
    pad=st.integers(0, 3),
    extra=st.integers(0, 5),
    down=st.integers(1, 3),
)
def test_all_phases_of_a_stride_in_one_pass(
    channels: int, stride: int, kernel: tuple[int, int], dilation: int, pad: int, extra: int, down: int
) -> None:
    """Phases that have one tap less than others, or none, and last vectors that lie over the ones before."""
    stride = min(stride, MAX_STRIDE)
    kernel = kernel[0], 2 * stride + kernel[1] - 1
    size = 8 + dilation * (kernel[0] - 1), 5 * stride + dilation * (kernel[1] - 1) + extra
    geometry = Geometry(kernel, (down, stride), (pad, pad), (1, dilation), channels)
    assert suits_residue_dgrad(planned((2, channels, *size), channels, geometry).shape)
    check_convolution(BACKEND, (2, channels, *size), channels, geometry)


@pytest.mark.parametrize(
    ("x_shape", "outputs", "geometry"),
    [
        ((2, 20, 1, 4, 4), 24, Geometry((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)),
        ((2, 20, 5, 5), 24, Geometry((3, 3), ONE, (6, 6), (6, 6), 1)),
        ((2, 48, 5, 5), 96, Geometry((3, 3), (2, 2), (6, 5), (6, 5), 2)),
    ],
)
def test_taps_that_never_meet_the_image(x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
    """They are left out of all sums; their own gradient is zero."""
    check_convolution(BACKEND, x_shape, outputs, geometry)


@pytest.mark.parametrize(
    ("x_shape", "outputs", "stride", "group"),
    [
        ((5, 96, 14, 14), 96, ONE, 4),
        ((5, 160, 14, 14), 160, ONE, 160),
        ((5, 48, 14, 14), 48, (2, 2), 48),
        ((4, 64, 28, 28), 64, ONE, 64),
        ((7, 36, 9, 8), 40, (2, 1), 2),
        ((7, 90, 9, 8), 100, (2, 1), 5),
    ],
)
def test_threads_change_no_bit(x_shape: tuple[int, ...], outputs: int, stride: tuple[int, int], group: int) -> None:
    geometry, weights_shape = Geometry((3, 3), stride, ONE, ONE, group), (outputs, x_shape[1] // group, 3, 3)
    y_shape = (x_shape[0], outputs, *((n - 1) // s + 1 for n, s in zip(x_shape[2:], stride, strict=True)))
    results = []
    for threads in (1, 2, 3, 5):
        backend = create_backend(None, threads)
        plan = backend.plan_convolution(x_shape, weights_shape, geometry)
        x, dy, on_weights = (to_device(backend, normal(i, s)) for i, s in enumerate((x_shape, y_shape, weights_shape)))
        y, dx, dweights = (dirty(backend, s) for s in (y_shape, x_shape, weights_shape))
        plan.forward(x, on_weights, None, y)
        plan.backward_data(dy, on_weights, dx)
        plan.backward_weights(x, dy, dweights, False)
        results.append([backend.to_host(a).copy() for a in (y, dx, dweights)])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pad"),
    [
        ((5, 7), (5, 7), (1, 1), (0, 0)),
        ((3, 4), (5, 6), (1, 1), (1, 1)),
        ((6, 5), (4, 3), (3, 3), (0, 0)),
        ((1, 9), (3, 9), (1, 2), (1, 0)),
    ],
)
def test_one_window(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> None:
    """The gradient of an image with a single window, which may lie within it or reach beyond it."""
    case = (3, 20, *size), 20, Geometry(kernel, stride, pad, (1, 1), 20)
    shape = planned(*case).shape
    assert shape.out == (1, 1)
    assert suits_scatter_dgrad(one_window(shape))
    check_convolution(BACKEND, *case)


@pytest.mark.parametrize("size", [(6, 7), (60, 61)])
@pytest.mark.parametrize("many", [17, 32])
def test_weights_of_many_outputs_for_each_channel(many: int, size: tuple[int, int]) -> None:
    """Channels are repeated for each of their outputs, a part of the batch at a time where images are large."""
    check_convolution(BACKEND, (3, 3, *size), 3 * many, Geometry((3, 2), (1, 2), (1, 0), (1, 1), 3))
