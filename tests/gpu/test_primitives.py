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

often = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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
        ((24,), (1, 2, 3, 4)), ((1,), ()), ((4, 6, 5, 7), (4, 6, 5, 7)),
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
    slope = checks.place(backend, np.float32(0.25))
    backend.apply(checks.plain, (checks.place(backend, x), checks.place(backend, y), slope), (out,))
    checks.close(backend.to_host(out), x - 0.25 * y)


def test_slices_of_flat_buffers_at_any_offset(backend: Backend) -> None:
    x = checks.normal(1, (4001,))
    buffer, out = checks.place(backend, x), checks.dirty(backend, x.shape)
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
@given(case=checks.convolutions())
def test_convolution_by_im2col(backend: Backend, case: tuple[tuple[int, ...], int, Geometry]) -> None:
    from caffepy.backend.cuda_im2col import Im2colConvolution

    checks.check_convolution(_Ways(backend, Im2colConvolution), *case, tolerance=TOLERANCE)


class _Ways:
    """A backend whose convolutions go the given ways only."""

    def __init__(self, backend: Any, *ways: Any) -> None:
        self._backend, self._ways = backend, ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def plan_convolution(self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> Any:
        from caffepy.backend.cuda_convolution import CudaConvolution, Direction, Problem, Resources

        b = self._backend
        problem = Problem(x_shape, weights_shape, geometry)
        resources = Resources(b._cudnn, b._handle, b._blas, b._scratch, False)
        ways = [way(problem, resources) for way in self._ways]
        return CudaConvolution(problem, dict.fromkeys(Direction, ways), b._scratch)


NETS = [
    (64, 1, 28, 20, window(5, 1, 0, 1)), (64, 20, 12, 50, window(5, 1, 0, 1)),  # LeNet
    (100, 3, 32, 32, window(5, 1, 2, 1)), (100, 32, 16, 32, window(5, 1, 2, 1)),  # cifar10_quick
    (8, 3, 227, 96, window(11, 4, 0, 1)), (8, 96, 27, 256, window(5, 1, 2, 1, group=2)),  # CaffeNet
    (8, 256, 13, 384, window(3, 1, 1, 1)), (8, 384, 13, 256, window(3, 1, 1, 1, group=2)),
    (8, 3, 224, 64, window(7, 2, 3, 1)), (8, 64, 56, 64, window(3, 1, 1, 1)),  # ResNet-50
    (8, 256, 56, 512, window(1, 2, 0, 1)), (8, 128, 56, 128, window(3, 2, 1, 1)), (8, 256, 14, 256, window(3, 1, 1, 1)),
    (8, 512, 7, 2048, window(1, 1, 0, 1)), (8, 16, 28, 32, window(5, 1, 2, 1)),
    (8, 128, 28, 128, window(3, 1, 1, 1, group=128)), (8, 64, 28, 64, window(3, 1, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("way_name", ["DirectCudnn", "CopiedCudnn"])
@pytest.mark.parametrize(("n", "c", "size", "outputs", "geometry"), NETS)
def test_cudnn_is_as_exact_as_plain_products(
    backend: Any, n: int, c: int, size: int, outputs: int, geometry: Geometry, way_name: str
) -> None:
    """At the sizes of real nets, where cuDNN chooses other engines than for small ones."""
    from caffepy.backend import cuda_cudnn
    from caffepy.backend.cuda_convolution import Direction, Problem, Resources
    from caffepy.backend.cuda_im2col import Im2colConvolution

    problem = Problem((n, c, size, size), (outputs, c // geometry.group, *geometry.kernel), geometry)
    resources = Resources(backend._cudnn, backend._handle, backend._blas, backend._scratch, False)
    cudnn, plain = getattr(cuda_cudnn, way_name)(problem, resources), Im2colConvolution(problem, resources)
    for direction in Direction:
        if not cudnn.prepare(direction):
            continue
        *inputs, out = problem.arrays(direction)
        first, second = (checks.place(backend, checks.normal(i, shape)) for i, shape in enumerate(inputs))
        results = [checks.dirty(backend, out) for _ in range(2)]
        cudnn.run(direction, first, second, results[0])
        plain.run(direction, first, second, results[1])
        checks.close(*map(backend.to_host, results), TOLERANCE)


@often
@given(case=checks.convolutions())
@pytest.mark.parametrize("way_name", ["DirectCudnn", "CopiedCudnn"])
def test_convolution_by_cudnn(backend: Any, way_name: str, case: Any) -> None:
    """Whatever cuDNN says it can compute is right."""
    from caffepy.backend import cuda_cudnn
    from caffepy.backend.cuda_im2col import Im2colConvolution

    way = getattr(cuda_cudnn, way_name)
    checks.check_convolution(_Ways(backend, way, Im2colConvolution), *case, tolerance=TOLERANCE)


def test_im2col_takes_large_batches_in_parts(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffepy.backend import cuda_im2col

    monkeypatch.setattr(cuda_im2col, "COLUMNS_LIMIT", 500)
    one_way: Any = _Ways(backend, cuda_im2col.Im2colConvolution)
    checks.check_convolution(one_way, (7, 4, 5, 5), 6, window(3, 1, 1, 1, group=2), tolerance=TOLERANCE)


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


@often
@given(case=checks.shapes_and_class_axis(), ignore=st.sampled_from([None, 0, 1]), valid=st.booleans())
def test_softmax_loss(backend: Backend, case: tuple[tuple[int, ...], int], ignore: int | None, valid: bool) -> None:
    checks.check_softmax_loss(backend, *case, ignore, valid)


@pytest.mark.parametrize("shape", [(256, 1000), (4, 21, 40, 50)])
def test_softmax_loss_over_many_blocks(backend: Backend, shape: tuple[int, ...]) -> None:
    checks.check_softmax(backend, shape, 1)
    checks.check_softmax_loss(backend, shape, 1, 3, True)
    checks.check_label_ranks(backend, shape, 1)


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
