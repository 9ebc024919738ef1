"""Gradient compression on GPUs; bfloat16 by kernels of its own, whatever CuPy's version knows of that type."""

from __future__ import annotations

from caffepy.backend.cuda.device import cupy
from caffepy.backend.types import Array
from caffepy.parallel.communicators.compression import Compressor, Format

_ROUND = """
unsigned int bits = __float_as_uint(x * factor);
unsigned int upper = bits >> 16;
bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
y = (unsigned short)(is_nan ? upper | 0x40u : (bits + 0x7fffu + (upper & 1u)) >> 16);
"""
_WIDEN = "y = __uint_as_float((unsigned int)x << 16);"


def device_compressor(kind: str, size: int) -> Compressor | None:
    """The compressor of arrays on GPUs, on the current stream, which may be captured.

    The bits of bfloat16 are the host's, but for numbers below 1.2e-38 (subnormal ones), which GPUs take for 0.
    Arguments as in `compression.host_compressor`.
    """
    if kind == "fp16":
        form = Format("float16", _round_float16, lambda copy, array: cupy.copyto(array, copy))
    elif kind == "bf16":
        rounding = cupy.ElementwiseKernel("float32 x, float32 factor", "uint16 y", _ROUND, "caffepy_to_bfloat16")
        widening = cupy.ElementwiseKernel("uint16 x", "float32 y", _WIDEN, "caffepy_from_bfloat16")
        form = Format("uint16", rounding, widening)
    else:
        return None
    return Compressor(form, size, cupy.empty, lambda array: int(array.data.ptr))


def _round_float16(array: Array, factor: float, copy: Array) -> None:
    cupy.multiply(array, factor, out=copy, casting="unsafe")
