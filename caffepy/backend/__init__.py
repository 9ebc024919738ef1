"""The device boundary: `Backend`'s primitives, implemented on NumPy and numba and on CuPy and cuDNN.

Every part above imports its root; the tables of tests/unit/test_imports.py say who imports more of it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from caffepy.backend.elementwise import Channel, Each, Expression, Scalar, expression
from caffepy.backend.handles import Convolution
from caffepy.backend.indexing_primitives import SparseMatrix
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, Geometry, LrnWindow, RandomStream
from caffepy.defaults import MATH_MODES
from caffepy.phases import phase

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
    "foreseeing",
    "foreseeing_on_cpu",
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
        with phase("numba import"):
            from caffepy.backend.cpu.backend import CpuBackend

        return CpuBackend(threads)
    with phase("CUDA import", "Loading CUDA's libraries"):
        from caffepy.backend.cuda.backend import CudaBackend

    with phase("CUDA context", "Starting CUDA"):
        return CudaBackend(device, math, autotune, deterministic)


def foreseeing_on_cpu(threads: int | None) -> Backend:
    """A CPU backend for nets whose kernels are only noted (`caffepy/backend/cpu/jit/ahead_of_time.py`)."""
    from caffepy.backend.cpu.foreseeing_backend import ForeseeingBackend

    return ForeseeingBackend(threads)


def foreseeing(backend: Backend, net: str) -> AbstractContextManager[Backend | None]:
    """Within a `with` block, a backend without memory on which a net is run for the kernels that it will ask for.

    Those that are in no cache are compiled by other processes meanwhile. An error within the block ends it and is
    logged.

    Args:
        backend: the device that will want them.
        net: whatever decides which they are.

    Returns:
        None where nothing is to be gained: on the CPU, and where the same net was foreseen before.
    """
    if "caffepy.backend.cuda.backend" not in sys.modules:
        return nullcontext(None)
    from caffepy.backend.cuda.backend import CudaBackend
    from caffepy.backend.cuda.compilation.foreseeing_backend import foreseeing_backend

    return foreseeing_backend(backend, net) if isinstance(backend, CudaBackend) else nullcontext(None)
