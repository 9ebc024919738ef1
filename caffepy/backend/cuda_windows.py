"""Pooling and local response normalisation: launches kernels/pooling.cu and kernels/lrn.cu."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from caffepy.backend.base import Array, Geometry
from caffepy.backend.cuda_kernels import aligned, argument, launch, library_kernel
from caffepy.backend.cuda_memory import raw


@lru_cache(maxsize=1024)
def _windows(image: tuple[int, ...], pooled: tuple[int, ...], geometry: Geometry) -> tuple[Any, ...]:
    """The kernels' arguments that describe the windows."""
    assert len(image) == 4 and len(geometry.kernel) == 2, "pooling has two spatial axes"
    sizes = (*image[2:], *pooled[2:])
    return tuple(map(argument, (image[1], *sizes, *geometry.kernel, *geometry.stride, *geometry.pad)))


def _pool(name: str, arrays: tuple[Array, ...], image: Array, pooled: Array, over: Array, geometry: Geometry) -> None:
    """Launch a pooling kernel with a thread for each element of `over`, or for four neighbouring channels of it."""
    windows = _windows(image.shape, pooled.shape, geometry)
    width = 4 if image.shape[1] % 4 == 0 and all(map(aligned, arrays)) else 1
    count = over.size // width
    launch(library_kernel("pooling", f"{name}_{width}"), count, (*map(raw, arrays), *windows, count))


def max_forward(x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
    """See `Backend.pool_max_forward`."""
    _pool("max_forward", (x, y, mask), x, y, y, geometry)


def max_backward(dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
    """See `Backend.pool_max_backward`."""
    _pool("max_backward", (dy, mask, dx), dx, dy, dx, geometry)


def average_forward(x: Array, y: Array, geometry: Geometry) -> None:
    """See `Backend.pool_average_forward`."""
    _pool("average_forward", (x, y), x, y, y, geometry)


def average_backward(dy: Array, dx: Array, geometry: Geometry) -> None:
    """See `Backend.pool_average_backward`."""
    _pool("average_backward", (dy, dx), dx, dy, dx, geometry)


def lrn_forward(x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float) -> None:
    """See `Backend.lrn_across_forward`."""
    arrays = tuple(map(raw, (x, y, scale)))
    numbers = (x.shape[1], size, float(alpha), float(beta), float(k), x.size)
    launch(library_kernel("lrn", "lrn_scale"), x.size, (*arrays, *numbers))


def lrn_backward(x: Array, y: Array, scale: Array, dy: Array, dx: Array, size: int, alpha: float, beta: float) -> None:
    """See `Backend.lrn_across_backward`."""
    arrays = tuple(map(raw, (x, y, scale, dy, dx)))
    numbers = (x.shape[1], size, float(alpha), float(beta), x.size)
    launch(library_kernel("lrn", "lrn_gradient"), x.size, (*arrays, *numbers))
