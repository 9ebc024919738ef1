"""Gradient compression to float16 or bfloat16: half the bytes, ten or seven bits of mantissa.

Owns the compressed copies, for transports that go over a wire. A bfloat16 array has the dtype uint16 and holds
the upper halves of float32 numbers, as everywhere in caffepy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.types import Array

_CHUNK = 1 << 15
"""Numbers that are rounded at a time, so that what lies in between stays in the processor's cache."""


class Fp16Compressor:
    """Float16 copies of float32 arrays, divided so that their sum is the mean.

    Numbers above 65,504 in absolute value become infinite, those below 6e-8 zero; NaN and infinity stay what they are.

    Args:
        module: numpy or cupy, whose arrays these are; the work goes on cupy's current stream.
        size: how many arrays the mean is of.
    """

    dtype = "float16"

    def __init__(self, module: Any, size: int) -> None:
        self._module = module
        self._factor = 1.0 / size
        self._copies: dict[tuple[int, int], Array] = {}

    def compress(self, array: Array) -> Array:
        """array / size in two bytes: (P,). Each array keeps its copy, so that nothing is allocated a second time."""
        key = (self._address(array), array.size)
        if key not in self._copies:
            self._copies[key] = self._module.empty(array.shape, self.dtype)
        copy = self._copies[key]
        self._round(array, copy)
        return copy

    def _address(self, array: Array) -> int:
        """Of the first element; GPU arrays override it."""
        return int(array.ctypes.data)

    def _round(self, array: Array, copy: Array) -> None:
        with np.errstate(all="ignore"):  # the update sees what became infinite, and skips it
            self._module.multiply(array, self._factor, out=copy, casting="unsafe")

    def decompress(self, copy: Array, array: Array) -> None:
        """array = the copy, once the copies of all ranks were added up."""
        self._module.copyto(array, copy)


class Bf16Compressor(Fp16Compressor):
    """Bfloat16 copies, rounded to the nearest, ties to even: float32's range with seven bits of mantissa.

    For host memory; `nccl_compression.py` has that of GPUs.
    """

    dtype = "uint16"

    def _round(self, array: Array, copy: Array) -> None:
        for start in range(0, array.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            round_to_bfloat16(array[part] * np.float32(self._factor), copy[part])

    def decompress(self, copy: Array, array: Array) -> None:
        widen_bfloat16(copy, array)


def host_compressor(kind: str, size: int) -> Fp16Compressor | None:
    """The compressor of host arrays; None where `kind`, one of `defaults.COMPRESSIONS`, is none.

    Args:
        kind: of compression.
        size: how many arrays a mean is of.
    """
    kinds: dict[str, type[Fp16Compressor]] = {"fp16": Fp16Compressor, "bf16": Bf16Compressor}
    return kinds[kind](np, size) if kind in kinds else None


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
