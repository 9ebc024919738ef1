"""Times of batch normalisation, ReLU's gradient and sums of arrays on one GPU, beside the time that their bytes need.

    python benchmarks/gpu_normalise.py [batch] [dtype ...]

For each kernel at ResNet-50's shapes: milliseconds (median of 5 groups of launches within a CUDA graph, walking through
several sets of arrays, so that no cache holds them), the floor, which is the bytes that must move at 4.3 TB/s (a device
copy on an H200), and floor / time. Then the same kernels at the size of small nets, in microseconds. PyTorch's
batch normalisation stands beside ours if it is installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy

from caffepy.backend.cuda.backend import CudaBackend
from caffepy.backend.types import BatchNormState, mask_bytes

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

BANDWIDTH = 4.3e12
RESNET = [(64, 112, 112), (64, 56, 56), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]
SMALL = [(64, 500), (100, 32, 16, 16), (100, 64, 8, 8), (128, 16, 32, 32)]
CACHE = 400e6
"""Bytes that a round through all sets of arrays moves at least."""


class Case:
    """Arrays of one shape and dtype, in several sets."""

    def __init__(self, backend: CudaBackend, shape: tuple[int, ...], dtype: str) -> None:
        self.backend, self.shape, self.dtype = backend, shape, dtype
        example = backend.zeros(shape, dtype)
        self.size, self.bytes = example.size, example.nbytes
        self.sets = [self._arrays() for _ in range(max(1, min(8, int(CACHE / (3 * example.nbytes)) + 1)))]
        channel = self._random((shape[1],), "float32")
        ones = backend.zeros((shape[1],))
        backend.fill(ones, 1)
        self.n = BatchNormState(channel, ones, ones, channel, *self.per_channel(2), backend.zeros((1,)), 1e-5, 0.9)
        self.sums = self.per_channel(2)

    def per_channel(self, count: int) -> list[Any]:
        return [self.backend.zeros((self.shape[1],)) for _ in range(count)]

    def _random(self, shape: tuple[int, ...], dtype: str) -> Any:
        array, numbers = self.backend.zeros(shape, dtype), cupy.random.standard_normal(1 << 20, dtype="float32")
        flat = self.backend.flat(array)
        for start in range(0, flat.size, numbers.size):
            part = flat[start : start + numbers.size]
            self.backend.copy(numbers[: part.size], part)
        return array

    def _arrays(self) -> dict[str, Any]:
        arrays = {name: self._random(self.shape, self.dtype) for name in "abcd"}
        arrays["mask"] = cupy.random.randint(0, 256, mask_bytes(self.size), dtype="uint8")
        return arrays

    def kernels(self) -> Iterator[tuple[str, Callable[[dict[str, Any]], None], float]]:
        """Name, work on one set of arrays, and the bytes that it must move, in arrays' sizes."""
        b, n, dbias = self.backend, self.n, self.sums[1]
        bit = self.size / 8 / self.bytes
        yield "measure", lambda s: b.batch_norm_measure(s["a"], n), 1
        yield "forward", lambda s: b.batch_norm_forward(s["a"], n, s["b"], relu=True), 2
        yield (
            "forward, residual and mask",
            lambda s: b.batch_norm_forward(s["a"], n, s["b"], s["c"], True, s["mask"]),
            3 + bit,
        )
        yield "sums", lambda s: b.batch_norm_backward_sums(s["a"], [s["b"]], n, self.sums), 2
        yield "sums, ReLU", lambda s: b.batch_norm_backward_sums(s["a"], [s["b"]], n, self.sums, True), 2
        yield (
            "sums, two gradients and mask",
            lambda s: b.batch_norm_backward_sums(s["a"], [s["b"], s["c"]], n, self.sums, True, s["mask"], s["d"]),
            4 + bit,
        )
        yield "data", lambda s: b.batch_norm_backward_data(s["a"], s["b"], n, self.sums, s["c"]), 3
        yield "data, ReLU", lambda s: b.batch_norm_backward_data(s["a"], s["b"], n, self.sums, s["c"], True), 3
        yield "ReLU's gradient", lambda s: b.relu_backward(s["a"], s["b"], s["c"], None, False), 3
        yield "ReLU's gradient and bias", lambda s: b.relu_backward(s["a"], s["b"], s["c"], dbias, False), 3
        yield "total of two", lambda s: b.add_n([s["a"], s["b"]], s["c"]), 3

    def milliseconds(self, work: Callable[[dict[str, Any]], None]) -> float:
        """Of one launch, within a graph of at least ten."""
        rounds = -(-10 // len(self.sets))

        def all_sets() -> None:
            for _ in range(rounds):
                for arrays in self.sets:
                    work(arrays)

        work(self.sets[0])
        graph = self.backend.capture(all_sets)
        graph.launch()
        return _median(graph.launch, self.backend.stream) / (rounds * len(self.sets))


def _median(launch: Callable[[], Any], stream: Any) -> float:
    times = []
    for _ in range(5):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


def large(backend: CudaBackend, batch: int, dtype: str) -> None:
    """All kernels at ResNet-50's shapes."""
    print(f"{'kernel, ' + dtype:<32}" + "".join(f"{'x'.join(map(str, s)):>24}" for s in RESNET))
    print(f"{'':<32}" + f"{'ms':>10}{'floor':>8}{'':>6}" * len(RESNET))
    lines: dict[str, list[str]] = {}
    for shape in RESNET:
        case = Case(backend, (batch, *shape), dtype)
        for name, work, arrays in case.kernels():
            time, floor = case.milliseconds(work), arrays * case.bytes / BANDWIDTH * 1e3
            lines.setdefault(name, []).append(f"{time:>10.4f}{floor:>8.4f}{floor / time:>6.2f}")
    for name, cells in lines.items():
        print(f"{name:<32}" + "".join(cells), flush=True)


def small(backend: CudaBackend, dtype: str) -> None:
    """All kernels at shapes of small nets."""
    print(f"{'kernel, ' + dtype + ', microseconds':<40}" + "".join(f"{'x'.join(map(str, s)):>16}" for s in SMALL))
    lines: dict[str, list[str]] = {}
    for shape in SMALL:
        case = Case(backend, shape, dtype)
        for name, work, _ in case.kernels():
            lines.setdefault(name, []).append(f"{case.milliseconds(work) * 1e3:>16.2f}")
    for name, cells in lines.items():
        print(f"{name:<40}" + "".join(cells), flush=True)


def _peer_forward(x: Any, mean: Any, variance: Any, scale: Any, bias: Any) -> Any:
    return F.relu(F.batch_norm(x, mean, variance, scale, bias, training=True), inplace=True)


def _peer_both(forward: Callable[[], Any], dy: Any) -> None:
    forward().backward(dy)


def peer(batch: int) -> None:
    """PyTorch's batch normalisation with ReLU in training, float16, channels last."""
    print(f"{'PyTorch, float16, ms':<32}" + "".join(f"{'x'.join(map(str, s)):>24}" for s in RESNET))
    cells: dict[str, list[str]] = {"forward": [], "forward and backward": []}
    for shape in RESNET:
        x = torch.randn((batch, *shape), device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)
        x.requires_grad_()
        scale, bias = (torch.ones(shape[0], device="cuda", requires_grad=True) for _ in "ab")
        mean, variance = torch.zeros(shape[0], device="cuda"), torch.ones(shape[0], device="cuda")
        dy = torch.randn_like(x)
        forward = partial(_peer_forward, x, mean, variance, scale, bias)
        both = partial(_peer_both, forward, dy)
        for name, work in (("forward", forward), ("forward and backward", both)):
            work()
            cells[name].append(f"{_median(work, cupy.cuda.Stream.null):>24.4f}")
    for name, line in cells.items():
        print(f"{name:<32}" + "".join(line), flush=True)


def main() -> None:
    """Every table."""
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    dtypes = sys.argv[2:] or ["float16", "float32"]
    backend = CudaBackend(0)
    with backend.activate():
        print(backend.device_description())
        for dtype in dtypes:
            large(backend, batch, dtype)
            small(backend, dtype)
    backend.close()
    if torch:
        peer(batch)


if __name__ == "__main__":
    main()
