"""The device boundary: `Backend`'s primitives, implemented on NumPy and numba and on CuPy and cuDNN."""

from __future__ import annotations

from caffepy.backend.base import Array, Backend, Convolution, Geometry, RandomStream
from caffepy.backend.expression import Channel, Each, Expression, Scalar, expression

__all__ = [
    "Array",
    "Backend",
    "Channel",
    "Convolution",
    "Each",
    "Expression",
    "Geometry",
    "RandomStream",
    "Scalar",
    "create_backend",
    "expression",
]


def create_backend(device: int | None = None, threads: int | None = None) -> Backend:
    """A backend of one device for one solver thread.

    Args:
        device: number of a CUDA device, or None for the CPU.
        threads: CPU threads that the backend may use; None takes all that the process may use.

    Raises:
        DeviceError: the device is not there.
        MissingExtraError: CuPy or cuDNN is not installed.
    """
    if device is None:
        from caffepy.backend.cpu import CpuBackend

        return CpuBackend(threads)
    from caffepy.backend.cuda import CudaBackend

    return CudaBackend(device)
