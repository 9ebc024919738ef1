"""The device boundary: `Backend`'s primitives, implemented on NumPy and numba and on CuPy and cuDNN.

Every part above imports its root; the tables of tests/unit/test_imports.py say who imports more of it.
"""

from __future__ import annotations

from caffepy.backend.elementwise import Channel, Each, Expression, Scalar, expression
from caffepy.backend.handles import Convolution
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, Geometry, LrnWindow, RandomStream, SparseMatrix
from caffepy.options.solver import MATH_MODES

__all__ = [
    "MATH_MODES",
    "Array",
    "Backend",
    "Channel",
    "Convolution",
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
    math: str = "fp32",
    autotune: bool = True,
    deterministic: bool = True,
) -> Backend:
    """A backend of one device for one solver thread.

    Args:
        device: number of a CUDA device, or None for the CPU.
        threads: CPU threads that the backend may use; None takes all that the process may use.
        math: one of MATH_MODES; the CPU computes in full float32 whatever it says.
        autotune: whether a GPU tries ways of computing each convolution and keeps the fastest.
        deterministic: whether a GPU must give the same bits in every run; the CPU always does.

    Raises:
        DeviceError: the device is not there.
        MissingExtraError: CuPy or cuDNN is not installed.
    """
    if device is None:
        from caffepy.backend.cpu.backend import CpuBackend

        return CpuBackend(threads)
    from caffepy.backend.cuda.backend import CudaBackend

    return CudaBackend(device, math, autotune, deterministic)
