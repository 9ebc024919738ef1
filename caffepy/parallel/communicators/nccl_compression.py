"""Gradient compression on GPUs; bfloat16 by kernels of its own, whatever CuPy's version knows of that type."""

from __future__ import annotations

from caffepy.backend.cuda.device import cupy
from caffepy.backend.types import Array
from caffepy.parallel.communicators.compression import Fp16Compressor

_ROUND = """
unsigned int bits = __float_as_uint(x * factor);
unsigned int upper = bits >> 16;
bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
y = (unsigned short)(is_nan ? upper | 0x40u : (bits + 0x7fffu + (upper & 1u)) >> 16);
"""
_WIDEN = "y = __uint_as_float((unsigned int)x << 16);"


class CudaFp16Compressor(Fp16Compressor):
    """`compression.Fp16Compressor` for arrays on GPUs, on the current stream, which may be captured.

    Args:
        size: how many arrays the mean is of.
    """

    def __init__(self, size: int) -> None:
        super().__init__(cupy, size)

    def _address(self, array: Array) -> int:
        return int(array.data.ptr)


class CudaBf16Compressor(CudaFp16Compressor):
    """`compression.Bf16Compressor` for arrays on GPUs, on the current stream, which may be captured.

    The bits are the same, but for numbers below 1.2e-38 (subnormal ones), which GPUs take for 0.

    Args:
        size: how many arrays the mean is of.
    """

    dtype = "uint16"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._rounding = cupy.ElementwiseKernel("float32 x, float32 factor", "uint16 y", _ROUND, "caffepy_to_bfloat16")
        self._widening = cupy.ElementwiseKernel("uint16 x", "float32 y", _WIDEN, "caffepy_from_bfloat16")

    def _round(self, array: Array, copy: Array) -> None:
        self._rounding(array, self._factor, copy)

    def decompress(self, copy: Array, array: Array) -> None:
        self._widening(copy, array)


def device_compressor(kind: str, size: int) -> Fp16Compressor | None:
    """The compressor of arrays on GPUs; arguments as in `compression.host_compressor`."""
    kinds: dict[str, type[CudaFp16Compressor]] = {"fp16": CudaFp16Compressor, "bf16": CudaBf16Compressor}
    return kinds[kind](size) if kind in kinds else None
