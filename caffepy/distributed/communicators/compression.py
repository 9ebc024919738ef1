"""Gradient compression to float16 or bfloat16: half the bytes, ten or seven bits of mantissa.

Owns the compressed copies, for transports that go over a wire. A bfloat16 array has the dtype uint16 and holds
the upper halves of float32 numbers, as everywhere in caffepy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.types import Array

_CHUNK = 1 << 15
"""Numbers that are rounded at a time, so that what lies in between stays in the processor's cache."""


class Format(NamedTuple):
    """How numbers are kept in two bytes.

    Args:
        dtype: of a copy.
        round: called with a float32 array, a factor and the copy, which becomes their product.
        widen: called with the copy and a float32 array, which becomes the copy's numbers.
    """

    dtype: str
    round: Callable[[Array, float, Array], Any]
    widen: Callable[[Array, Array], Any]


class Compressor:
    """Copies of float32 arrays in two bytes a number, divided so that their sum is the mean.

    In float16 numbers above 65,504 in absolute value become infinite, those below 6e-8 zero; bfloat16 has float32's
    range with seven bits of mantissa. Both are rounded to the nearest, ties to even; NaN and infinity stay what they
    are.

    Args:
        form: of the copies.
        size: how many arrays the mean is of.
        empty: makes a copy of a shape and dtype.
        address: of an array's first element.
    """

    def __init__(self, form: Format, size: int, empty: Callable[..., Array], address: Callable[[Array], int]) -> None:
        self._format = form
        self._factor = 1.0 / size
        self._empty = empty
        self._address = address
        self._copies: dict[tuple[int, int], Array] = {}

    def compress(self, array: Array) -> Array:
        """array / size in two bytes: (P,). Each array keeps its copy, so that nothing is allocated a second time."""
        key = self._address(array), array.size
        if key not in self._copies:
            self._copies[key] = self._empty(array.shape, self._format.dtype)
        self._format.round(array, self._factor, self._copies[key])
        return self._copies[key]

    def decompress(self, copy: Array, array: Array) -> None:
        """array = the copy, once the copies of all ranks were added up."""
        self._format.widen(copy, array)


def host_compressor(kind: str, size: int) -> Compressor | None:
    """The compressor of host arrays; None where `kind`, one of `defaults.COMPRESSIONS`, is none.

    Args:
        kind: of compression.
        size: how many arrays a mean is of.
    """
    form = _FORMATS.get(kind)
    return None if form is None else Compressor(form, size, np.empty, lambda array: int(array.ctypes.data))


def _round_float16(array: np.ndarray, factor: float, copy: np.ndarray) -> None:
    with np.errstate(all="ignore"):  # the update sees what became infinite, and skips it
        np.multiply(array, factor, out=copy, casting="unsafe")


def _round_bfloat16(array: np.ndarray, factor: float, copy: np.ndarray) -> None:
    for start in range(0, array.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        round_to_bfloat16(array[part] * np.float32(factor), copy[part])


def round_to_bfloat16(values: np.ndarray, target: np.ndarray) -> None:
    """target, uint16 (P,), = values, float32 (P,), rounded to the nearest bfloat16, to even in the middle."""
    for start in range(0, values.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        bits = values[part].view(np.uint32)
        upper = bits >> 16
        rounded = (bits + ((upper & 1) + np.uint32(0x7FFF))) >> 16
        # The sum could carry a NaN's bits over into the sign; a NaN needs one bit below the exponent.
        target[part] = np.where(np.isnan(values[part]), upper | np.uint32(0x40), rounded)


def widen_bfloat16(copy: np.ndarray, target: np.ndarray) -> None:
    """target, float32 (P,), = the numbers of a bfloat16 array."""
    np.left_shift(copy, 16, out=target.view(np.uint32), dtype=np.uint32)


def add_bfloat16(source: np.ndarray, total: np.ndarray) -> None:
    """total += source, bfloat16 arrays (P,), rounded once."""
    for start in range(0, total.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        sums, others = (np.empty(total[part].size, np.float32) for _ in range(2))
        widen_bfloat16(total[part], sums)
        widen_bfloat16(source[part], others)
        with np.errstate(all="ignore"):
            sums += others
        round_to_bfloat16(sums, total[part])


_FORMATS = {
    "fp16": Format("float16", _round_float16, lambda copy, array: np.copyto(array, copy)),
    "bf16": Format("uint16", _round_bfloat16, widen_bfloat16),
}
