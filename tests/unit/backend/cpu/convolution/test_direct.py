"""Data gradients with a stride, which are transposed convolutions, beside float64."""

from __future__ import annotations

import numpy as np
from backend_arrays import dirty, to_device
from convolution_reference import convolution
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend

AXES = st.builds(
    lambda windows, factor, kernel, stride, pad: (windows, factor * kernel, factor * stride, factor * pad),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 1),
).filter(lambda axis: axis[2] * (axis[0] - 1) + axis[1] > 2 * axis[3])
"""Windows, kernel, stride and padding along an axis, often with a common divisor."""


@settings(max_examples=60, derandomize=True)
@given(
    images=st.integers(1, 3),
    channels=st.integers(1, 34),
    outputs=st.integers(1, 20),
    axes=st.tuples(AXES, AXES),
    rest=st.integers(0, 1),
    threads=st.integers(1, 3),
)
def test_transposed_convolutions_are_what_float64_gives(
    images: int, channels: int, outputs: int, axes: tuple[tuple[int, ...], ...], rest: int, threads: int
) -> None:
    backend, random = CpuBackend(threads), np.random.default_rng(channels)
    windows, kernel, stride, pad = zip(*axes, strict=True)
    # With a rest, the last column is in no window if the stride is above 1, and no pixels can be merged.
    width = stride[1] * (windows[1] - 1) + kernel[1] - 2 * pad[1] + min(rest, stride[1] - 1)
    sizes = stride[0] * (windows[0] - 1) + kernel[0] - 2 * pad[0], width
    geometry = Geometry(kernel, stride, pad, (1, 1), 1)
    shapes = (images, channels, *sizes), (outputs, channels, *kernel), (images, outputs, *windows)
    x, weights, dy = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    dx = dirty(backend, shapes[0])
    plan = backend.plan_convolution(shapes[0], shapes[1], geometry)
    plan.backward_data(to_device(backend, dy), to_device(backend, weights), dx)
    wanted = convolution(x, weights, dy, geometry)[1]
    np.testing.assert_allclose(dx, wanted, rtol=0, atol=2e-6 * max(1, np.abs(wanted).max()))
