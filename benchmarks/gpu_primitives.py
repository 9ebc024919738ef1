"""Times of the CUDA backend's primitives beside the time that their bytes need, and beside PyTorch's in the same run.

    python benchmarks/gpu_primitives.py [batch]

For each primitive and dtype: microseconds within a CUDA graph (median of 5 launches of 20 calls), the floor, which is
the bytes that must move at 4.3 TB/s (a device copy on an H200), floor / time, and PyTorch's microseconds for the same
work in channels-last layout, as a CUDA graph too, if PyTorch is installed. Arrays smaller than the cache may be faster
than the floor; of the small ones at the end the latency is what counts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import cupy

from caffepy.backend import Channel, Each, Geometry, LrnWindow, RandomStream, Scalar, expression
from caffepy.backend.cuda.backend import CudaBackend
from caffepy.backend.types import DTYPES

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

CALLS, GROUPS = 20, 5
BANDWIDTH = 4.3e6
"""Bytes a microsecond."""


@expression
def relu(x: Each, slope: Scalar) -> Each:
    return x if x > 0 else slope * x


@expression
def scale_and_shift(x: Each, gain: Channel, shift: Channel) -> Each:
    return gain * x + shift


@expression
def moments(x: Each) -> tuple[Each, Each]:
    return x, x * x


@expression
def same(x: Each) -> Each:
    return x


@expression
def update(
    data: Each, diff: Each, history: Each, rate: Channel, decay: Channel, momentum: Scalar
) -> tuple[Each, Each, Each]:
    step = momentum * history + rate * (diff + decay * data)
    return data - step, step, data - step


class Table:
    """Prints one line a primitive."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        print(backend.device_description())
        print(f"{'primitive':<66}{'dtype':<10}{'us':>9}{'floor':>9}{'share':>7}{'PyTorch':>9}")

    def microseconds(self, work: Callable[[], Any]) -> float:
        """Median time of a call within a graph of several."""
        work()
        stream = self.backend.stream
        stream.begin_capture()
        for _ in range(CALLS):
            work()
        graph, times = stream.end_capture(), []
        for _ in range(GROUPS + 1):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / CALLS)
        return statistics.median(times[1:])

    def peer(self, work: Callable[[], Any]) -> float:
        """The same of PyTorch's work."""
        with torch.cuda.stream(torch.cuda.Stream()):
            work()
        torch.cuda.synchronize()
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                work()
        for _ in range(GROUPS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
        return statistics.median(times[1:])

    def line(self, name: str, dtype: str, moved: float, ours: Callable[[], Any], theirs: Any = None) -> None:
        """Time both; `moved` are the bytes that the work must read and write."""
        time, floor = self.microseconds(ours), moved / BANDWIDTH
        peer = f"{self.peer(theirs):.1f}" if theirs and torch else "-"
        print(f"{name:<66}{dtype:<10}{time:>9.1f}{floor:>9.1f}{floor / time:>7.0%}{peer:>9}", flush=True)


def normal(backend: CudaBackend, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Random numbers on the device."""
    numbers = backend.zeros(shape)
    backend.random_uniform(numbers, RandomStream(1, 2), (0, 0))
    numbers -= 0.5
    array = backend.zeros(shape, dtype)
    backend.copy(numbers, array)
    return array


def peer(array: Any) -> Any:
    """The same memory as a PyTorch tensor."""
    if torch is None:
        return None
    tensor = torch.from_dlpack(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def elementwise(table: Table, dtype: str, batch: int) -> None:
    """Formulas and sums over (batch, 256, 56, 56)."""
    backend = table.backend
    x, y = normal(backend, (batch, 256, 56, 56), dtype), backend.zeros((batch, 256, 56, 56), dtype)
    gain, sums, squares, total = normal(backend, (256,)), *(backend.zeros(s) for s in ((256,), (256,), ()))
    tx, ty = peer(x), peer(y)
    size = x.nbytes
    table.line("relu", dtype, 2 * size, lambda: backend.apply(relu, (x, 0.0), (y,)), lambda: F.relu(tx))
    table.line("add", dtype, 3 * size, lambda: backend.add(x, y), lambda: ty.add_(tx))
    table.line(
        "scale and shift a channel", dtype, 2 * size, lambda: backend.apply(scale_and_shift, (x, gain, gain), (y,))
    )
    table.line(
        "sum and sum of squares a channel",
        dtype,
        size,
        lambda: backend.reduce(moments, (x,), (sums, squares)),
        lambda: torch.var_mean(tx, (0, 2, 3)),
    )
    table.line(
        "sum and sum of squares of all",
        dtype,
        size,
        lambda: backend.reduce(moments, (x,), (total, total)),
        lambda: torch.linalg.vector_norm(tx),
    )
    if dtype != "float32":
        wide = normal(backend, x.shape)
        twide = peer(wide)
        table.line("cast from float32", dtype, 3 * size, lambda: backend.copy(wide, y), lambda: ty.copy_(twide))


def copies(table: Table, dtype: str, batch: int) -> None:
    """Concat's copy, and the copy before a fully connected layer."""
    backend = table.backend
    part, whole = normal(backend, (batch, 192, 28, 28), dtype), backend.zeros((batch, 480, 28, 28), dtype)
    table.line("192 of 480 channels at 28", dtype, 2 * part.nbytes, lambda: backend.copy(part, whole[:, 64:256]))
    x, row = normal(backend, (batch, 512, 7, 7), dtype), backend.zeros((batch, 512, 7, 7), dtype)
    row = backend.flat(row).reshape(x.shape)
    table.line("channels last to C order, 512 at 7", dtype, 2 * x.nbytes, lambda: backend.copy(x, row))


def updates(table: Table) -> None:
    """An update of flat buffers that writes a half copy of the data as well."""
    backend = table.backend
    for count in (25557032, 138357544):
        shape = (count // 64, 64)
        data, diff, history = (normal(backend, shape) for _ in range(3))
        half, rate = backend.zeros(shape, "float16"), normal(backend, shape[:1])
        inputs = (data, diff, history, rate, rate, 0.9)
        table.line(
            f"update of {count / 1e6:.0f} million parameters",
            "mixed",
            22 * data.size,
            lambda i=inputs, o=(data, history, half): backend.apply(update, i, o, 0),
        )


def pooling(table: Table, dtype: str, shape: tuple[int, ...], kernel: int, stride: int) -> None:
    """Maximum and average, forward and backward."""
    backend = table.backend
    out = -(-(shape[2] - kernel) // stride) + 1
    x, y = normal(backend, shape, dtype), backend.zeros((*shape[:2], out, out), dtype)
    mask = backend.zeros(y.shape, "uint8")
    g = Geometry((kernel,) * 2, (stride,) * 2, (0, 0), (1, 1))
    tx, size, name = peer(x), x.nbytes + y.nbytes, f"pooling {kernel}x{kernel} / {stride} of {shape}"
    table.line(
        f"max {name}",
        dtype,
        size + mask.nbytes,
        lambda: backend.pool_max_forward(x, y, mask, g),
        lambda: F.max_pool2d(tx, kernel, stride, ceil_mode=True, return_indices=True),
    )
    table.line("  backward", dtype, size + mask.nbytes, lambda: backend.pool_max_backward(y, mask, x, g))
    table.line(
        f"average {name}",
        dtype,
        size,
        lambda: backend.pool_average_forward(x, y, g),
        lambda: F.avg_pool2d(tx, kernel, stride, ceil_mode=True),
    )
    table.line("  backward", dtype, size, lambda: backend.pool_average_backward(y, x, g))


def normalisation(table: Table, dtype: str, shape: tuple[int, ...]) -> None:
    """LRN over five channels."""
    backend = table.backend
    x, dy, y = normal(backend, shape, dtype), normal(backend, shape, dtype), backend.zeros(shape, dtype)
    tx = peer(x)
    table.line(
        f"LRN of {shape}",
        dtype,
        2 * x.nbytes,
        lambda: backend.lrn_across_forward(x, y, None, LrnWindow(5, 1e-4, 0.75)),
        lambda: F.local_response_norm(tx, 5, 1e-4, 0.75, 1.0),
    )
    table.line(
        "  backward",
        dtype,
        3 * x.nbytes,
        lambda: backend.lrn_across_backward(x, None, None, dy, y, LrnWindow(5, 1e-4, 0.75)),
    )


def dropping(table: Table, dtype: str, shape: tuple[int, ...]) -> None:
    """Dropout with numbers made on the way."""
    backend = table.backend
    x, y = normal(backend, shape, dtype), backend.zeros(shape, dtype)
    counter, tx = backend.zeros((2,), "uint64"), peer(x)
    table.line(
        f"dropout of {shape}",
        dtype,
        2 * x.nbytes,
        lambda: backend.dropout(x, y, 0.5, RandomStream(1, 2), counter),
        lambda: F.dropout(tx, 0.5),
    )


def small(table: Table) -> None:
    """What LeNet and the classifiers of larger nets ask for; here the latency counts."""
    backend = table.backend
    for shape in [(64, 10), (64, 500), (256, 1000), (64, 20, 24, 24)]:
        channel_sums(backend, table, shape)
    for shape in [(64, 10), (256, 1000)]:
        loss(backend, table, shape)


def channel_sums(backend: CudaBackend, table: Table, shape: tuple[int, ...]) -> None:
    """A bias's gradient."""
    x, sums = normal(backend, shape), backend.zeros((shape[1],))
    tx, summed = peer(x), tuple(a for a in range(len(shape)) if a != 1)
    name = f"sums of {shape} for each channel"
    table.line(name, "float32", x.nbytes, lambda: backend.reduce(same, (x,), (sums,)), lambda: tx.sum(summed))


def loss(backend: CudaBackend, table: Table, shape: tuple[int, ...]) -> None:
    """Softmax with its loss."""
    x, labels, totals = normal(backend, shape), backend.zeros(shape[:1]), backend.zeros((2,))
    probabilities, bad, tx = backend.zeros(shape), backend.zeros((1,), "int32"), peer(x)
    forward = (x, labels, probabilities, totals, bad, 1, None)
    backward = (probabilities, labels, x, totals, 1, None, 1.0)
    targets = None if torch is None else torch.zeros(shape[0], dtype=torch.int64, device="cuda")
    table.line(
        f"softmax with loss of {shape}",
        "float32",
        2 * x.nbytes,
        lambda: backend.softmax_loss_forward(*forward),
        lambda: F.cross_entropy(tx, targets),
    )
    table.line("  backward", "float32", 2 * x.nbytes, lambda: backend.softmax_loss_backward(*backward))


def main() -> None:
    """Everything."""
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    backend = CudaBackend(0)
    with backend.activate():
        table = Table(backend)
        for dtype in DTYPES:
            elementwise(table, dtype, batch)
            copies(table, dtype, batch)
            for shape, kernel, stride in [
                ((2 * batch, 64, 112, 112), 3, 2),
                ((2 * batch, 96, 55, 55), 3, 2),
                ((batch, 64, 224, 224), 2, 2),
            ]:
                pooling(table, dtype, shape, kernel, stride)
            for channels, size in [(96, 55), (96, 27), (256, 13)]:
                normalisation(table, dtype, (2 * batch, channels, size, size))
            dropping(table, dtype, (2 * batch, 4096))
        updates(table)
        small(table)
    backend.close()


if __name__ == "__main__":
    main()
