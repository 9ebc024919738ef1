"""The device boundary: `Backend`'s primitives, implemented with NumPy and numba and with CuPy and cuDNN.

Modules above import this package's root; the tables of tests/unit/test_imports.py list the exceptions.
"""

from __future__ import annotations

from caffepy.backend.expression import Channel, Each, Expression, Scalar, expression
from caffepy.backend.interface import Backend
from caffepy.backend.types import (
    Array,
    Border,
    Convolution,
    CorrelationWindow,
    Geometry,
    LrnWindow,
    RandomStream,
    SparseMatrix,
)
from caffepy.utils.options import MATH, MATH_MODES

__all__ = [
    "MATH_MODES",
    "Array",
    "Backend",
    "Border",
    "Channel",
    "Convolution",
    "CorrelationWindow",
    "Each",
    "Expression",
    "Geometry",
    "LrnWindow",
    "RandomStream",
    "Scalar",
    "SparseMatrix",
    "create_backend",
    "expression",
]


def create_backend(
    device: int | None = None,
    threads: int | None = None,
    math: str = MATH,
    autotune: bool = True,
    deterministic: bool = True,
) -> Backend:
    """Create a backend for one device and one solver thread.

    Args:
        device: CUDA device number, or None for the CPU.
        threads: CPU threads that the backend may use; None: all that the process may use.
        math: one of MATH_MODES, "tf32" as in `caffepy train`; the CPU always computes in float32.
        autotune: whether a GPU times several algorithms for each convolution and keeps the fastest.
        deterministic: whether a GPU must give the same bits in every run; the CPU always does.

    Raises:
        DeviceError: the device does not exist.
        MissingExtraError: CuPy or cuDNN is not installed.
    """
    if device is None:
        from caffepy.backend.cpu.backend import CpuBackend

        return CpuBackend(threads)
    from caffepy.backend.cuda.backend import CudaBackend

    return CudaBackend(device, math, autotune, deterministic)
