"""Products of parts: what cuBLAS is asked for, computed in NumPy as cuBLAS defines it, over strided host arrays."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


class HostArray(np.ndarray):
    """An array with an address like CuPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


@pytest.fixture(scope="module")
def module(cupy_or_mock: None) -> Any:
    return importlib.import_module("caffepy.backend.cuda.dense")


def columns_at(pointer: Any, rows: int, columns: int, leading: int) -> Any:
    """The float32 matrix that lies column after column at an address; a view."""
    assert leading >= rows
    size, first = leading * (columns - 1) + rows, ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    flat = np.ctypeslib.as_array(first, (size,))
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (4, 4 * leading))


def strided_batch(
    _: Any, first: int, second: int, rows: int, columns: int, depth: int, one: Any, a: Any, a_kind: int, a_leading: int,
    a_step: Any, b: Any, b_kind: int, b_leading: int, b_step: Any, beta: Any, c: Any, c_kind: int, c_leading: int,
    c_step: Any, count: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """cublasGemmStridedBatchedEx of float32 arrays in host memory."""
    for part in range(count):

        def matrix(pointer: Any, step: Any, *shape: int, part: int = part) -> Any:
            return columns_at(ctypes.c_void_p(pointer.value + 4 * step.value * part), *shape)

        left = matrix(a, a_step, *((depth, rows) if first else (rows, depth)), a_leading)
        right = matrix(b, b_step, *((columns, depth) if second else (depth, columns)), b_leading)
        out = matrix(c, c_step, rows, columns, c_leading)
        product = (left.T if first else left) @ (right.T if second else right)
        out[:] = product + (out if beta._obj.value else 0)
    return 0


def blas(module: Any) -> Any:
    made = object.__new__(module.Blas)
    made._handle, made._batch = None, strided_batch
    made._one, made._zero = (ctypes.byref(ctypes.c_float(value)) for value in (1.0, 0.0))
    return made


def groups_of(pixels: int, number: int, width: int, rng: Any) -> Any:
    """The channels of each group, (group, pixel, channel), of an array in which groups lie side by side."""
    array = rng.standard_normal((pixels, number * width)).astype(np.float32).view(HostArray)
    return array.reshape(pixels, number, width).transpose(1, 0, 2)


@given(pixels=st.integers(1, 9), number=st.integers(1, 4), channels=st.integers(1, 5), outputs=st.integers(1, 5))
def test_products_of_groups_that_lie_side_by_side(
    module: Any, pixels: int, number: int, channels: int, outputs: int
) -> None:
    rng = np.random.default_rng(1)
    x, y = (groups_of(pixels, number, width, rng) for width in (channels, outputs))
    weights = rng.standard_normal((number, outputs, channels)).astype(np.float32).view(HostArray)
    for a, b, out, flags, accumulate in (
        (x, weights, y.copy(order="K"), (False, True), False),
        (y, weights, x.copy(order="K"), (False, False), False),
        (y, x, weights.copy(), (True, False), True),
    ):
        left, right = a.swapaxes(1, 2) if flags[0] else a, b.swapaxes(1, 2) if flags[1] else b
        expected = np.array(left) @ np.array(right) + (np.array(out) if accumulate else 0)
        blas(module).gemm_of_parts(a, b, out, *flags, accumulate)
        np.testing.assert_allclose(np.array(out), expected, rtol=1e-4, atol=1e-5)
