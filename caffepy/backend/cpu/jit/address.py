"""Addresses of array elements, for compiled kernels and for system calls from Python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_HEADER = object.__basicsize__


def _field_address(array: Any) -> int:
    """Read the data pointer, the first field of NumPy's array object."""
    return ctypes.c_ssize_t.from_address(id(array) + _HEADER).value


def _documented_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _choose_address() -> Callable[[Any], int]:
    # The documented way takes 2 us, as long as a small kernel, and a kernel has up to ten arrays.
    probes = [np.zeros(3), np.zeros((4, 5))[1:, 2:], np.zeros(())]
    try:
        same = all(_field_address(probe) == _documented_address(probe) for probe in probes)
    except ValueError:
        same = False
    return _field_address if same and sys.implementation.name == "cpython" else _documented_address


address_of: Callable[[Any], int] = _choose_address()
"""Return the address of an array's first element."""
