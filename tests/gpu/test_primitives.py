"""Every primitive of the CUDA backend against the float64 oracle."""

from __future__ import annotations

from typing import Any

import backend_checks as checks
import numpy as np
import pytest
from backend_checks import CHANNELS, SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffepy.backend import Backend, Geometry

often = settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
TOLERANCE = 2e-5


def window(*numbers: int, group: int = 1) -> Geometry:
    """A square window: kernel, stride, pad, dilation."""
    kernel, stride, pad, dilation = numbers
    return Geometry((kernel,) * 2, (stride,) * 2, (pad,) * 2, (dilation,) * 2, group)


@often
@given(shape=st.lists(SIZES, max_size=5))
def test_memory(backend: Backend, shape: list[int]) -> None:
    checks.check_memory(backend, tuple(shape))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 6, 5, 7), (4, 210)), ((4, 210), (4, 6, 5, 7)), ((4, 6, 1, 1), (4, 6)), ((4, 6), (4, 6, 1, 1)),
        ((4, 1, 5, 7), (4, 35)), ((4, 6, 5, 7), (2, 12, 7, 5)), ((8, 3), (2, 3, 4)), ((4, 6, 5, 7), (4, 6, 35)),
        ((24,), (1, 2, 3, 4)), ((1,), ()), ((4, 6, 5, 7), (4, 6, 5, 7)), ((2, 6, 4, 5), (2, 3, 2, 4, 5)),
        ((2, 3, 2, 4, 5), (2, 6, 4, 5)), ((2, 3, 2, 4, 5), (6, 40)), ((6, 40), (2, 3, 2, 4, 5)),
    ],
)  # fmt: skip
def test_reshaped(backend: Backend, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    checks.check_reshaped(backend, old, new)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_slices(backend: Backend, axis: int) -> None:
    checks.check_slices(backend, (5, 6, 7, 8), axis, 1, 4)


@often
@given(case=checks.shapes_and_axes())
def test_apply(backend: Backend, case: tuple[tuple[int, ...], int, int]) -> None:
    checks.check_apply(backend, *case)


@often
@given(case=checks.shapes_and_axes())
def test_reduce(backend: Backend, case: tuple[tuple[int, ...], int, int]) -> None:
    checks.check_reduce(backend, *case)


@pytest.mark.parametrize("shape", [(64, 20, 12, 12), (3, 7, 41, 33), (200, 500), (1000000,), (5, 3, 9, 9, 9)])
@pytest.mark.parametrize("axis", [0, 1])
def test_apply_and_reduce_over_many_blocks(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    axis = min(axis, len(shape) - 1)
    checks.check_apply(backend, shape, axis, 1)
    checks.check_reduce(backend, shape, axis, 1)


def test_a_scalar_may_lie_on_the_device(backend: Backend) -> None:
    x, y = checks.normal(1, (5, 8, 3, 3)), checks.normal(2, (5, 8, 3, 3))
    out = checks.dirty(backend, x.shape)
    slope = checks.to_device(backend, np.float32(0.25))
    backend.apply(checks.plain, (checks.to_device(backend, x), checks.to_device(backend, y), slope), (out,))
    checks.close(backend.to_host(out), x - 0.25 * y)


def test_slices_of_flat_buffers_at_any_offset(backend: Backend) -> None:
    x = checks.normal(1, (4001,))
    buffer, out = checks.to_device(backend, x), checks.dirty(backend, x.shape)
    for start, stop in [(0, 4000), (1, 4001), (4, 4000), (2, 5)]:
        backend.apply(checks.plain, (buffer[start:stop], buffer[start:stop], 0.5), (out[start:stop],))
        checks.close(backend.to_host(out[start:stop]), 0.5 * x[start:stop])


@often
@given(
    m=st.sampled_from([1, 2, 7, 64]), n=st.sampled_from([1, 3, 10, 65]), k=st.sampled_from([1, 5, 300]),
    transpose_a=st.booleans(), transpose_b=st.booleans(), sliced=st.booleans(),
)  # fmt: skip
def test_gemm(backend: Backend, **case: Any) -> None:
    checks.check_gemm(backend, **case)


@often
@given(case=checks.convolutions())
def test_convolution(backend: Backend, case: tuple[tuple[int, ...], int, Geometry]) -> None:
    checks.check_convolution(backend, *case, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("x_shape", "outputs", "geometry"),
    [
        ((2, 32, 14, 14), 32, window(3, 1, 1, 1)),
        ((2, 32, 14, 14), 32, window(3, 1, 1, 1, group=32)),
        ((2, 32, 9, 9), 64, window(3, 2, 1, 1, group=4)),
        ((1, 3, 23, 23), 16, window(7, 2, 3, 1)),
        ((1, 8, 13, 13), 8, window(3, 1, 2, 2)),
        ((1, 64, 7, 7), 32, window(1, 1, 0, 1)),
        ((1, 4, 11, 9), 6, Geometry((3, 2), (2, 1), (1, 0), (1, 2))),
        ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
        ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2))),
        ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 2)),
        ((1, 2, 3, 4, 3, 4), 3, Geometry((2,) * 4, (1,) * 4, (0, 1, 0, 1), (1,) * 4)),
    ],
)
def test_convolution_shapes(backend: Backend, x_shape: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
    checks.check_convolution(backend, x_shape, outputs, geometry, tolerance=TOLERANCE)


@often
@given(case=checks.poolings(), ties=st.booleans())
def test_pool_max(backend: Backend, case: Any, ties: bool) -> None:
    checks.check_pool_max(backend, *case, ties=ties)


@often
@given(case=checks.poolings())
def test_pool_average(backend: Backend, case: Any) -> None:
    checks.check_pool_average(backend, *case)


@often
@given(n=SIZES, c=CHANNELS, size=st.sampled_from([1, 3, 5]), beta=st.sampled_from([0.75, 0.5, 1.0]))
def test_lrn(backend: Backend, n: int, c: int, size: int, beta: float) -> None:
    checks.check_lrn(backend, (n, c, 3, 2), size, 0.3, beta, 1.5)


@often
@given(case=checks.shapes_and_class_axis())
def test_softmax(backend: Backend, case: tuple[tuple[int, ...], int]) -> None:
    checks.check_softmax(backend, *case)
    checks.check_smoothing(backend, *case, None)


@often
@given(case=checks.shapes_and_class_axis(), ignore=st.sampled_from([None, 0, 1]), valid=st.booleans())
def test_softmax_loss(backend: Backend, case: tuple[tuple[int, ...], int], ignore: int | None, valid: bool) -> None:
    checks.check_softmax_loss(backend, *case, ignore, valid)


@pytest.mark.parametrize("shape", [(256, 1000), (4, 21, 40, 50)])
def test_softmax_loss_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    checks.check_softmax(backend, shape, 1)
    checks.check_softmax_loss(backend, shape, 1, 3, True)
    checks.check_label_ranks(backend, shape, 1)
    checks.check_smoothing(backend, shape, 1, 3)


@often
@given(case=checks.shapes_and_class_axis())
def test_labels(backend: Backend, case: tuple[tuple[int, ...], int]) -> None:
    checks.check_bad_labels(backend, *case)
    checks.check_label_ranks(backend, *case)


@pytest.mark.parametrize("shape", [(3,), (4, 7), (3, 500), (2, 3, 5, 4), (2, 1, 5, 3), (2, 6, 1, 1), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("first_sample", [0, 2**32 - 1])
def test_random_uniform(backend: Backend, shape: tuple[int, ...], first_sample: int) -> None:
    checks.check_random_uniform(backend, shape, 2**40 + 12345, 0xDEADBEEF, 7, first_sample)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4, 5, 2), (100003,)])
def test_all_finite(backend: Backend, shape: tuple[int, ...]) -> None:
    checks.check_all_finite(backend, shape)
