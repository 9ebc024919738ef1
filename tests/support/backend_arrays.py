"""Numbers on a backend in any dtype of blobs, what a dtype keeps of them, and how near a result must be."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend import Backend, Geometry

TOLERANCE = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Allowed distance of a result from float64, relative to the array's largest value."""


def close(actual: Any, expected: Any, tolerance: float = TOLERANCE["float32"]) -> None:
    """Assert equal shapes and values within `tolerance` of the largest expected one; NaN and inf must coincide."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    finite = np.isfinite(expected)
    limit = tolerance * max(1e-30, np.abs(expected[finite]).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


def agrees(backend: Backend, array: Any, expected: Any, dtype: str = "float32") -> None:
    """Assert that an array on the backend is near float64 numbers, as its dtype allows."""
    close(backend.to_host(array), expected, TOLERANCE[dtype])


def normal(seed: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed float32 numbers, others for each seed."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def to_device(backend: Backend, host: Any, dtype: str = "float32") -> Any:
    """The numbers on the backend."""
    array = backend.zeros(np.shape(host), dtype)
    backend.from_host(np.asarray(host), array)
    return array


def stored(backend: Backend, seed: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """Random numbers on the backend, and what their dtype keeps of them."""
    host = normal(seed, shape)
    return to_device(backend, host, dtype), rounded(host, dtype)


def dirty(backend: Backend, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """An output array full of a number that must not be there afterwards."""
    array = backend.zeros(shape, dtype)
    backend.fill(array, 77)
    return array


def rounded(host: Any, dtype: str) -> Any:
    """What a dtype keeps of float32 numbers, as float32."""
    host = np.asarray(host, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return host.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        words = np.ascontiguousarray(host).view(np.uint32).astype(np.uint64)
        upper = (((words + 0x7FFF + ((words >> 16) & 1)) >> 16) << 16).astype(np.uint32)
        return np.where(np.isnan(host), np.float32(np.nan), upper.view(np.float32).reshape(host.shape))
    return host


def bits(values: Any, dtype: str) -> Any:
    """Numbers that a dtype keeps exactly, as it stores them."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def numbers(array: Any) -> Any:
    """What a NumPy array in any dtype holds."""
    array = np.asarray(array)
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(float)


def window(kernel: Any, stride: int = 1, pad: int = 0, dilation: int = 1, group: int = 1) -> Geometry:
    """A window over two axes, square unless `kernel` has both sides."""
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return Geometry(sides, (stride,) * 2, (pad,) * 2, (dilation,) * 2, group)
