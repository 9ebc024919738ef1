"""Random shapes and settings of the suite."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from caffepy.backend import Geometry

often = settings(max_examples=40, suppress_health_check=list(HealthCheck))
some = settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)
"""For each dtype or pair of dtypes: a GPU compiles kernels for many of the examples."""

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8])
CHANNELS = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 17, 33])


@st.composite
def convolutions(draw: Any) -> tuple[tuple[int, ...], int, Geometry]:
    """(x's shape, outputs, geometry) of a convolution over two axes that has an output."""
    group = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inputs = group * draw(st.sampled_from([1, 2, 3, 7, 16]))
    outputs = group * draw(st.sampled_from([1, 2, 3, 7, 16, 20, 33]))
    kernel, stride, pad, dilation, size = [], [], [], [], []
    for _ in range(2):
        kernel.append(draw(st.integers(1, 4)))
        stride.append(draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 2)))
        pad.append(draw(st.integers(0, 3)))
        fewest = max(1, dilation[-1] * (kernel[-1] - 1) + 1 - 2 * pad[-1])
        size.append(fewest + draw(st.integers(0, 6)))
    geometry = Geometry(tuple(kernel), tuple(stride), tuple(pad), tuple(dilation), group)
    return (draw(st.sampled_from([1, 2, 3])), inputs, *size), outputs, geometry


@st.composite
def poolings(draw: Any) -> tuple[tuple[int, ...], tuple[int, int], Geometry]:
    """(x's shape, y's spatial shape, geometry) of a pooling as Caffe's layer asks for, rounded up or down."""
    axes: list[tuple[int, ...]] = []
    for _ in range(2):
        k = draw(st.integers(1, 4))
        s, p = draw(st.integers(1, 4)), draw(st.integers(0, k - 1))
        n = draw(st.integers(max(1, k - 2 * p), 9))
        spare = n + 2 * p - k
        count = (-(-spare // s) if draw(st.booleans()) else spare // s) + 1
        while count > 1 and (count - 1) * s >= n + p:  # Caffe: the last window starts inside the image
            count -= 1
        axes.append((k, s, p, n, count))
    kernel, stride, pad, size, out = zip(*axes, strict=True)
    geometry = Geometry(kernel, stride, pad, (1, 1))
    return (draw(st.sampled_from([1, 2])), draw(CHANNELS), *size), out, geometry


@st.composite
def shapes_and_axes(draw: Any) -> tuple[tuple[int, ...], int, int]:
    """(shape, axis, number of axes) for `Channel` arguments."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=5)))
    axis = draw(st.integers(0, len(shape) - 1))
    return shape, axis, draw(st.integers(1, len(shape) - axis))


@st.composite
def repeats(draw: Any) -> tuple[tuple[int, ...], int, list[tuple[int, ...]]]:
    """(shape, axis, three shapes of some axes from it on, of which any may be 1) for arguments that repeat."""
    shape, axis, axes = draw(shapes_and_axes())
    own = shape[axis : axis + axes]
    return shape, axis, [tuple(size if draw(st.booleans()) else 1 for size in own) for _ in range(3)]


@st.composite
def shapes_and_class_axis(draw: Any) -> tuple[tuple[int, ...], int]:
    """(shape, axis of the classes)."""
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4)))
    return shape, draw(st.integers(0, len(shape) - 1))
