"""Depthwise convolution on the CPU against the general one, which is plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.convolution.depthwise import DepthwiseConvolution
from caffepy.backend.cpu.convolution.reference import GeneralConvolution

PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


def arrays(channels: int, images: int, size: tuple[int, int], geometry: Geometry, threads: int = 1) -> list[np.ndarray]:
    """y, dx and dweights (added to what was there), and the general convolution's after them."""
    backend = create_backend(None, threads)
    x_shape, w_shape = (images, channels, *size), (channels, 1, *geometry.kernel)
    plan = backend.plan_convolution(x_shape, w_shape, geometry)
    assert isinstance(plan, DepthwiseConvolution)
    general = GeneralConvolution(x_shape, w_shape, geometry)
    x, weights, bias = backend.zeros(x_shape), backend.zeros(w_shape), backend.zeros((channels,))
    rng = np.random.default_rng(3)
    for array in (x, weights, bias):
        array[...] = rng.standard_normal(array.shape)
    y_shape = (images, channels, *general._out)
    dy = backend.zeros(y_shape)
    dy[...] = rng.standard_normal(y_shape)
    results = []
    for one in (plan, general):
        y, dx, dweights = backend.zeros(y_shape), backend.zeros(x_shape), backend.zeros(w_shape)
        dx[...], dweights[...] = np.nan, 2
        one.forward(x, weights, bias, y, relu=True)
        one.backward_data(dy, weights, dx)
        one.backward_weights(x, dy, dweights, True)
        results += [y, dx, dweights]
    return results


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    channels=st.integers(2, 19), images=st.integers(1, 3), extra=PAIR, kernel=PAIR, stride=PAIR, pad=PAIR, dilation=PAIR
)
def test_it_is_the_general_convolution(
    channels: int, images: int, extra: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int],
    pad: tuple[int, int], dilation: tuple[int, int],
) -> None:  # fmt: skip
    pad = (pad[0] - 1, pad[1] - 1)
    size = tuple(max(1, d * (k - 1) + e + 2 - 2 * p) for k, d, e, p in zip(kernel, dilation, extra, pad, strict=True))
    geometry = Geometry(kernel, stride, pad, dilation, channels)
    found = arrays(channels, images, (size[0], size[1]), geometry)
    for value, wanted in zip(found[:3], found[3:], strict=True):
        assert np.abs(value - wanted).max() <= 1e-5 * max(float(np.abs(wanted).max()), 1.0)


def test_threads_change_no_bit() -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 64)
    for one, two in zip(arrays(64, 4, (28, 28), geometry), arrays(64, 4, (28, 28), geometry, 2), strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("weights", [(6, 2, 3, 3), (1, 1, 3, 3)])
def test_other_groups_are_not_depthwise(weights: tuple[int, ...]) -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 3 if weights[1] == 2 else 1)
    plan = create_backend(None, 1).plan_convolution((1, geometry.group * weights[1], 5, 5), weights, geometry)
    assert not isinstance(plan, DepthwiseConvolution)
