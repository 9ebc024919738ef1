"""Depthwise convolutions over one axis on the CPU, along the lines of channels."""

from __future__ import annotations

import backend_checks as checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry, create_backend
from caffepy.backend.cpu.convolution.depthwise.lines import MIN_LINE, LinesConvolution
from caffepy.backend.cpu.jit.vector import WIDTH

BACKEND = create_backend(None, 2)


@settings(max_examples=25, derandomize=True)
@given(
    images=st.integers(1, 3), channels=st.integers(1, 20), many=st.integers(1, 3),
    out=st.integers(MIN_LINE, 3 * MIN_LINE),
    kernel=st.integers(1, 9), stride=st.integers(1, 3), pad=st.integers(0, 5), dilation=st.integers(1, 4),
)  # fmt: skip
def test_every_window(
    images: int, channels: int, many: int, out: int, kernel: int, stride: int, pad: int, dilation: int
) -> None:
    """Those that lie beside the line altogether as well, and padding wider than the kernel."""
    width = max(MIN_LINE * stride, (out - 1) * stride + dilation * (kernel - 1) + 1 - 2 * pad)
    geometry = Geometry((kernel,), (stride,), (pad,), (dilation,), channels)
    shapes = (images, channels, width), (channels * many, 1, kernel)
    assert isinstance(BACKEND.plan_convolution(*shapes, geometry), LinesConvolution)
    checks.check_convolution(BACKEND, shapes[0], channels * many, geometry)


@pytest.mark.parametrize(
    ("channels", "width", "lines"), [(64, MIN_LINE, True), (64, MIN_LINE - 1, False), (2, WIDTH, True)]
)
def test_short_lines_of_many_channels_go_another_way(channels: int, width: int, lines: bool) -> None:
    geometry = Geometry((3,), (1,), (1,), (1,), channels)
    plan = BACKEND.plan_convolution((2, channels, width), (channels, 1, 3), geometry)
    assert isinstance(plan, LinesConvolution) == lines


def test_rectified_and_the_same_on_any_number_of_threads() -> None:
    geometry = Geometry((5,), (2,), (2,), (1,), 12)
    x, weights, bias = checks.normal(1, (3, 12, 300)), checks.normal(2, (12, 1, 5)), checks.normal(3, (12,))
    dy, results = checks.normal(4, (3, 12, 150)), []
    for threads in (1, 2):
        plan = create_backend(None, threads).plan_convolution(x.shape, weights.shape, geometry)
        plain, y, dx, dw = (np.full_like(a, 7) for a in (dy, dy, x, weights))
        plan.forward(x, weights, bias, plain)
        plan.forward(x, weights, bias, y, relu=True)
        plan.backward_data(dy, weights, dx)
        plan.backward_weights(x, dy, dw, accumulate=False)
        assert np.array_equal(y, np.maximum(plain, 0))
        assert plain.min() < 0
        results.append((y, dx, dw))
    assert all(np.array_equal(one, two) for one, two in zip(*results, strict=True))
