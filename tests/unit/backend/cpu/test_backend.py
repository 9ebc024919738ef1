"""Every primitive of the CPU backend against the float64 oracle."""

from __future__ import annotations

import backend_checks as checks
import backend_oracle
import numpy as np
import pytest
from backend_checks import CHANNELS, SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import Each, Geometry, RandomStream, Scalar, create_backend, expression
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.errors import DeviceError

BACKEND = CpuBackend(2)
often = settings(max_examples=40)
LARGE = [(64, 20, 12, 12), (3, 7, 41, 33), (200, 500), (100000,), (5, 3, 9, 9, 9)]


@often
@given(st.lists(SIZES, max_size=5))
def test_memory(shape: list[int]) -> None:
    checks.check_memory(BACKEND, tuple(shape))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 6, 5, 7), (4, 210)), ((4, 210), (4, 6, 5, 7)), ((4, 6, 1, 1), (4, 6)), ((4, 6), (4, 6, 1, 1)),
        ((4, 1, 5, 7), (4, 35)), ((4, 6, 5, 7), (2, 12, 7, 5)), ((8, 3), (2, 3, 4)), ((4, 6, 5, 7), (4, 6, 35)),
        ((24,), (1, 2, 3, 4)), ((1,), ()),
    ],
)  # fmt: skip
def test_reshaped(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    checks.check_reshaped(BACKEND, old, new)


def test_reshaped_is_a_view_where_memory_order_allows() -> None:
    array = BACKEND.zeros((4, 6, 1, 1))
    assert np.shares_memory(BACKEND.reshaped(array, (4, 6)), array)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_slices(axis: int) -> None:
    checks.check_slices(BACKEND, (5, 6, 7, 8), axis, 1, 4)


@often
@given(checks.shapes_and_axes())
def test_apply(case: tuple[tuple[int, ...], int, int]) -> None:
    checks.check_apply(BACKEND, *case)


@often
@given(checks.shapes_and_axes())
def test_reduce(case: tuple[tuple[int, ...], int, int]) -> None:
    checks.check_reduce(BACKEND, *case)


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("axis", [0, 1])
def test_apply_and_reduce_in_parallel(shape: tuple[int, ...], axis: int) -> None:
    axis = min(axis, len(shape) - 1)
    checks.check_apply(BACKEND, shape, axis, 1)
    checks.check_reduce(BACKEND, shape, axis, 1)


@pytest.mark.parametrize("shape", [(3, 40, 37, 29), (2, 5, 64, 65), (4, 130, 7, 7), (2, 9, 8, 9, 10)])
def test_numbers_for_the_channels_of_each_sample(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Squeeze-and-Excitation's factors, without an array of the image's size for them."""
    monkeypatch.setattr(CpuBackend, "_spread", None)
    checks.check_apply(BACKEND, shape, 0, 2)
    monkeypatch.undo()
    checks.check_reduce(BACKEND, shape, 0, 2)
    out, x = BACKEND.zeros(shape[:2]), checks.normal(1, shape)
    monkeypatch.setattr(CpuBackend, "_reduce_general", None)
    BACKEND.reduce(checks.two, (checks.to_device(BACKEND, x),) * 2, (out, BACKEND.zeros(shape[:2])), 0)
    np.testing.assert_allclose(out, (x.astype(float) ** 2).sum(axis=tuple(range(2, len(shape)))), rtol=1e-5)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    x = checks.normal(1, (37, 19, 33, 31))
    results = []
    for threads in (1, 2):
        backend = CpuBackend(threads)
        for shape in ((), (19,)):
            out = backend.zeros(shape)
            backend.reduce(checks.two, (checks.to_device(backend, x),) * 2, (out, backend.zeros(shape)))
            results.append(backend.to_host(out))
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[3])


@expression
def keep_finite(x: Each, limit: Scalar) -> Each:
    return x if x - x == 0 else limit


def test_formulas_keep_nan_and_infinity() -> None:
    x = np.array([1, np.nan, np.inf, -np.inf, -0.0] * 5, np.float32)
    out = checks.dirty(BACKEND, (25,))
    BACKEND.apply(keep_finite, (x, 5.0), (out,))
    assert np.array_equal(out[:5], np.array([1, 5, 5, 5, 0], np.float32))
    BACKEND.apply(checks.plain, (x, np.zeros(25, np.float32), 1.0), (out,))
    assert np.array_equal(out, x, equal_nan=True)


@often
@given(SIZES, CHANNELS, st.sampled_from([1, 2, 9, 40]), st.booleans(), st.booleans(), st.booleans())
def test_gemm(m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, sliced: bool) -> None:
    checks.check_gemm(BACKEND, m, n, k, transpose_a, transpose_b, sliced)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 500, 64), (10, 1003, 700), (129, 257, 1025), (700, 33, 10), (5, 2003, 300)]
)
def test_gemm_large(transpose_a: bool, transpose_b: bool, m: int, n: int, k: int) -> None:
    checks.check_gemm(BACKEND, m, n, k, transpose_a, transpose_b, sliced=True)


@often
@given(checks.convolutions())
def test_convolution(case: tuple[tuple[int, ...], int, Geometry]) -> None:
    checks.check_convolution(BACKEND, *case)


@pytest.mark.parametrize(
    ("x_shape", "outputs", "kernel", "stride", "pad", "dilation", "group"),
    [
        ((2, 3, 17), 4, (3,), (2,), (1,), (1,), 1),
        ((1, 4, 5, 4, 3), 6, (3, 2, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 2),
        ((4, 16, 9, 9), 32, (1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((4, 16, 9, 9), 32, (1, 1), (2, 2), (0, 0), (1, 1), 1),
        ((3, 6, 8, 8), 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
        ((2, 1, 12, 12), 20, (5, 5), (1, 1), (0, 0), (1, 1), 1),
        ((1, 3, 23, 23), 24, (11, 11), (4, 4), (0, 0), (1, 1), 1),
    ],
)
def test_convolution_kinds(
    x_shape: tuple[int, ...], outputs: int, kernel: tuple[int, ...], stride: tuple[int, ...],
    pad: tuple[int, ...], dilation: tuple[int, ...], group: int,
) -> None:  # fmt: skip
    checks.check_convolution(BACKEND, x_shape, outputs, Geometry(kernel, stride, pad, dilation, group))


@often
@given(checks.poolings(), st.booleans())
def test_pool_max(case: tuple[tuple[int, ...], tuple[int, int], Geometry], ties: bool) -> None:
    checks.check_pool_max(BACKEND, *case, ties)


@often
@given(checks.poolings())
def test_pool_average(case: tuple[tuple[int, ...], tuple[int, int], Geometry]) -> None:
    checks.check_pool_average(BACKEND, *case)


def test_pooling_in_parallel() -> None:
    geometry = Geometry((3, 3), (2, 2), (1, 1), (1, 1))
    for shape in ((9, 20, 17, 17), (1, 67, 25, 25)):
        checks.check_pool_max(BACKEND, shape, (9, 9) if shape[0] == 9 else (13, 13), geometry)
        checks.check_pool_average(BACKEND, shape, (9, 9) if shape[0] == 9 else (13, 13), geometry)


@often
@given(SIZES, CHANNELS, st.sampled_from([1, 3, 4, 5, 9]), st.sampled_from([0.75, 0.5, 1.3]), st.sampled_from([1, 2]))
def test_lrn(size: int, channels: int, window: int, beta: float, k: float) -> None:
    checks.check_lrn(BACKEND, (2, channels, size, 3), window, 0.7, beta, k)


@often
@given(checks.shapes_and_class_axis())
def test_softmax(case: tuple[tuple[int, ...], int]) -> None:
    checks.check_softmax(BACKEND, *case)
    checks.check_label_ranks(BACKEND, *case)
    checks.check_smoothing(BACKEND, *case, 0)
    checks.check_bad_labels(BACKEND, *case)


@often
@given(checks.shapes_and_class_axis(), st.sampled_from([None, 0, 1, 255]), st.booleans())
def test_softmax_loss(case: tuple[tuple[int, ...], int], ignore_label: int | None, divide_by_valid: bool) -> None:
    checks.check_softmax_loss(BACKEND, *case, ignore_label, divide_by_valid)


@settings(max_examples=15)
@given(
    st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1), st.integers(0, 2**40),
)  # fmt: skip
def test_random_uniform(shape: list[int], seed: int, stream: int, pass_number: int, first: int) -> None:
    checks.check_random_uniform(BACKEND, tuple(shape), seed, stream, pass_number, first)


@pytest.mark.parametrize(
    "shape", [(2, 32, 6, 6), (1, 8, 2, 2), (3, 70, 5, 4), (2, 9, 4, 3, 2), (3, 2052), (2, 1, 60, 60)]
)
def test_random_numbers_of_vectors(shape: tuple[int, ...]) -> None:
    checks.check_random_uniform(BACKEND, shape, 2**63 + 5, 77, 9, 2**40)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors that the Random123 library publishes for philox4x32-10."""
    assert backend_oracle.philox(counter, key) == expected


def test_random_numbers_do_not_depend_on_how_samples_are_spread() -> None:
    whole, part = BACKEND.zeros((6, 3, 5, 5)), BACKEND.zeros((2, 3, 5, 5))
    stream = RandomStream(2**63 + 5, 77)
    BACKEND.random_uniform(whole, stream, (9, 100))
    BACKEND.random_uniform(part, stream, (9, 104))
    assert np.array_equal(whole[4:], part)
    assert whole.min() >= 0
    assert whole.max() < 1


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7, 11), (300000,)])
def test_all_finite(shape: tuple[int, ...]) -> None:
    checks.check_all_finite(BACKEND, shape)


def test_too_few_threads() -> None:
    with pytest.raises(DeviceError, match="0 CPU threads are too few"):
        CpuBackend(0)


def test_out_of_memory_says_how_much() -> None:
    with pytest.raises(DeviceError, match=r"out of memory: \d+\.\d\d GiB .*use a smaller batch_size"):
        BACKEND.zeros((2**22, 2**22, 2, 2))


def test_description() -> None:
    assert create_backend(None, 1).device_description() == "CPU, 1 thread"
    assert create_backend(None, 2).device_description() == "CPU, 2 threads"
