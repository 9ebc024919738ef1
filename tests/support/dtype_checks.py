"""Arrays in any dtype, and what is left of numbers there; for the tests of the CUDA backend's dtypes."""

from __future__ import annotations

from typing import Any

import backend_checks as checks
import numpy as np
import pytest
from backend_checks import normal
from hypothesis import HealthCheck, settings

from caffepy.backend import Backend
from caffepy.backend.types import DTYPES

some = settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
STEP = {"float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Allowed distance relative to the largest value: a rounding of the result, wherever in its binade it is."""

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 8, 4, 4), (1, 33, 6, 5), (4, 64, 7, 7), (5, 10), (7,), (2, 3, 4, 5, 6), ()]


def rounded(host: Any, dtype: str) -> Any:
    """What is left of float32 numbers in a dtype, as float32."""
    if dtype == "float32":
        return host
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return host.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(host).view(np.uint32).astype(np.uint64)
    whole = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).reshape(host.shape)
    return np.where(np.isnan(host), np.float32(np.nan), whole)


def stored(backend: Backend, seed: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """Random numbers on the device, and what is stored there."""
    host = normal(seed, shape)
    return checks.to_device(backend, host, dtype), rounded(host, dtype)


def agrees(backend: Backend, array: Any, expected: Any, dtype: str) -> None:
    checks.close(backend.to_host(array), expected, STEP[dtype])
