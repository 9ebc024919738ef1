"""Times of the CUDA backend's primitives at ResNet-50's shapes, beside PyTorch's in the same run.

    python benchmarks/gpu_primitives.py [batch]

Prints milliseconds (median of 20), the bandwidth or arithmetic rate that they mean, and PyTorch's milliseconds for the
same work in channels-last layout if PyTorch is installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import cupy

from caffepy.backend import Channel, Each, Geometry, RandomStream, Scalar, expression
from caffepy.backend.cuda import CudaBackend

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None


@expression
def relu(x: Each, slope: Scalar) -> Each:
    return x if x > 0 else slope * x


@expression
def scale_and_shift(x: Each, gain: Channel, shift: Channel) -> Each:
    return gain * x + shift


@expression
def moments(x: Each) -> tuple[Each, Each]:
    return x, x * x


def milliseconds(work: Callable[[], Any], stream: Any) -> float:
    """Median time of 20 runs on a stream after three more."""
    times = []
    for run in range(23):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        if run >= 3:
            times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


class Table:
    """Prints one line a primitive."""

    def __init__(self, backend: CudaBackend) -> None:
        self.stream = backend.stream
        print(f"{backend.device_description()}, math {backend.math}")
        print(f"{'primitive':<72}{'ms':>9}{'rate':>16}{'PyTorch ms':>12}")

    def line(
        self, name: str, ours: Callable[[], Any], gigabytes: float = 0, teraflop: float = 0, theirs: Any = None
    ) -> None:
        """Time both; the rate is what ours achieves of the bytes or operations that the work needs."""
        time = milliseconds(ours, self.stream)
        rate = f"{gigabytes / time * 1e3:.0f} GB/s" if gigabytes else f"{teraflop / time * 1e3:.1f} TFLOP/s"
        peer = f"{milliseconds(theirs, cupy.cuda.Stream.null):.3f}" if theirs and torch else "-"
        print(f"{name:<72}{time:>9.3f}{rate:>16}{peer:>12}", flush=True)


def normal(backend: CudaBackend, shape: tuple[int, ...]) -> Any:
    """Random numbers on the device."""
    array = backend.zeros(shape)
    backend.random_uniform(array, RandomStream(1, 2), (0, 0))
    array -= 0.5
    return array


def peer(array: Any) -> Any:
    """The same memory as a PyTorch tensor."""
    return torch.from_dlpack(array) if torch else None


def elementwise(backend: CudaBackend, table: Table, batch: int) -> None:
    """Memory-bound work over (batch, 256, 56, 56)."""
    x = normal(backend, (batch, 256, 56, 56))
    y, gain, sums, squares = backend.zeros(x.shape), normal(backend, (256,)), *(backend.zeros((256,)) for _ in "ab")
    total = backend.zeros(())
    size = x.nbytes / 1e9
    tx, ty, tg = peer(x), peer(y), peer(gain.reshape(1, 256, 1, 1))
    table.line("copy", lambda: backend.copy(x, y), 2 * size, theirs=lambda: ty.copy_(tx))
    table.line("relu", lambda: backend.apply(relu, (x, 0.0), (y,)), 2 * size, theirs=lambda: F.relu(tx))
    table.line("add", lambda: backend.add(x, y), 3 * size, theirs=lambda: ty.add_(tx))
    table.line(
        "scale and shift a channel",
        lambda: backend.apply(scale_and_shift, (x, gain, gain), (y,)), 2 * size, theirs=lambda: tg * tx + tg,
    )  # fmt: skip
    table.line(
        "sum and sum of squares a channel",
        lambda: backend.reduce(moments, (x,), (sums, squares)), size, theirs=lambda: torch.var_mean(tx, (0, 2, 3)),
    )  # fmt: skip
    table.line(
        "sum of squares of all",
        lambda: backend.reduce(moments, (x,), (total, total)), size, theirs=lambda: torch.linalg.vector_norm(tx),
    )  # fmt: skip
    table.line(
        "random numbers",
        lambda: backend.random_uniform(y, RandomStream(1, 2), (3, 4)), size, theirs=lambda: ty.uniform_(),
    )  # fmt: skip


def windows(backend: CudaBackend, table: Table, batch: int) -> None:
    """Pooling after the first convolution, LRN at CaffeNet's shape."""
    x, y = normal(backend, (batch, 64, 112, 112)), backend.zeros((batch, 64, 56, 56))
    mask, dx = backend.zeros(y.shape, "int32"), backend.zeros(x.shape)
    g = Geometry((3, 3), (2, 2), (0, 0), (1, 1))
    size, small = x.nbytes / 1e9, y.nbytes / 1e9
    tx = peer(x)
    table.line(
        "max pooling 3x3 / 2",
        lambda: backend.pool_max_forward(x, y, mask, g), size + 2 * small,
        theirs=lambda: F.max_pool2d(tx, 3, 2, ceil_mode=True, return_indices=True),
    )  # fmt: skip
    table.line("  backward", lambda: backend.pool_max_backward(y, mask, dx, g), size + 2 * small)
    table.line("average pooling 3x3 / 2", lambda: backend.pool_average_forward(x, y, g), size + small)
    x, y, scale = normal(backend, (batch, 96, 55, 55)), *(backend.zeros((batch, 96, 55, 55)) for _ in "ab")
    tx = peer(x)
    table.line(
        "LRN over 5 channels",
        lambda: backend.lrn_across_forward(x, y, scale, 5, 1e-4, 0.75, 1.0), 3 * x.nbytes / 1e9,
        theirs=lambda: F.local_response_norm(tx, 5, 1e-4, 0.75, 1.0),
    )  # fmt: skip
    table.line(
        "  backward",
        lambda: backend.lrn_across_backward(x, y, scale, x, y, 5, 1e-4, 0.75, 1.0), 5 * x.nbytes / 1e9,
    )  # fmt: skip


def products(backend: CudaBackend, table: Table, batch: int) -> None:
    """Convolutions and a fully connected layer."""
    if torch:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = backend.math == "tf32"
    for channels, outputs, size, kernel, stride, group in [
        (3, 64, 224, 7, 2, 1), (64, 64, 56, 3, 1, 1), (256, 512, 56, 1, 2, 1), (256, 256, 14, 3, 1, 1),
        (96, 256, 27, 5, 1, 2), (128, 128, 28, 3, 1, 128),
    ]:  # fmt: skip
        convolution(backend, table, (batch, channels, size, size), (outputs, channels // group, kernel, kernel), stride)
    a, b, out = normal(backend, (batch, 4096)), normal(backend, (4096, 4096)), backend.zeros((batch, 4096))
    ta, tb = peer(a), peer(b)
    table.line(
        f"product of {batch} x 4096 and 4096 x 4096",
        lambda: backend.gemm(a, b, out, transpose_b=True), teraflop=2 * batch * 4096**2 / 1e12,
        theirs=lambda: ta @ tb.T,
    )  # fmt: skip


def convolution(
    backend: CudaBackend, table: Table, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], stride: int
) -> None:
    """The three directions of one convolution."""
    from caffepy.backend.cuda_convolution import Direction

    kernel, group = weights_shape[2], x_shape[1] // weights_shape[1]
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1), group)
    plan: Any = backend.plan_convolution(x_shape, weights_shape, geometry)
    x, weights, y = normal(backend, x_shape), normal(backend, weights_shape), normal(backend, plan.problem.y)
    dx, dweights = backend.zeros(x_shape), backend.zeros(weights_shape)
    work = 2 * y.size * weights[0].size / 1e12
    settings = {"stride": stride, "padding": kernel // 2, "groups": group}
    tx, tw, ty = peer(x), peer(weights), peer(y)
    name = f"{kernel}x{kernel}/{stride} {x_shape[1]}->{weights_shape[0]} at {x_shape[2]}, groups {group},"
    for direction, ours, theirs in [
        (Direction.FORWARD, lambda: plan.forward(x, weights, None, y), lambda: F.conv2d(tx, tw, **settings)),
        (Direction.DATA, lambda: plan.backward_data(y, weights, dx),
         lambda: torch.nn.grad.conv2d_input(tx.shape, tw, ty, **settings)),
        (Direction.WEIGHTS, lambda: plan.backward_weights(x, y, dweights, False),
         lambda: torch.nn.grad.conv2d_weight(tx, tw.shape, ty, **settings)),
    ]:  # fmt: skip
        way = plan.way(direction).name
        table.line(f"{name} {direction.name.lower()} ({way})", ours, teraflop=work, theirs=theirs)


def main() -> None:
    """Everything, in both math modes where it matters."""
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    for math in ("fp32", "tf32"):
        backend = CudaBackend(0, math=math)
        with backend.activate():
            table = Table(backend)
            if math == "fp32":
                elementwise(backend, table, batch)
                windows(backend, table, batch)
            products(backend, table, batch)
        backend.close()


if __name__ == "__main__":
    main()
