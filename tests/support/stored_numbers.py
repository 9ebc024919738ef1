"""The dtypes of blobs on the host: what each keeps of float32 numbers, and its bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend import Geometry

STORAGES = ["float32", "float16", "bfloat16"]
TOLERANCE = {"float32": 2e-3, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Relative to the largest value: TF32's rounding of factors, or the dtype's rounding of the result."""


def window(kernel: Any, stride: int = 1, pad: int = 0, dilation: int = 1, group: int = 1) -> Geometry:
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    return Geometry(sides, (stride,) * 2, (pad,) * 2, (dilation,) * 2, group)


def rounded(values: Any, dtype: str) -> Any:
    """The numbers as a dtype keeps them, as float32."""
    values = np.asarray(values, np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values


def bits(values: Any, dtype: str) -> Any:
    """The numbers as a dtype stores them."""
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def numbers(stored: Any) -> Any:
    """What an array in any dtype holds."""
    stored = np.asarray(stored)
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(float)
