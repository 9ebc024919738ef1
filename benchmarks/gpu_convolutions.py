"""Times of all convolutions of a net on one GPU, beside those of PyTorch in the same run.

    python benchmarks/gpu_convolutions.py [net ...]

Nets: resnet50, vgg16, mobilenet, depthwise (mobilenet's), caffenet, lenet, cifar10_quick; all of them by default. For
each net and dtype it prints the milliseconds of all its convolutions together, each timed by itself: forward, forward
with bias and ReLU, forward with sums for batch normalisation, gradients to data and to weights (the first layer has no
gradient to data), and how long that took with planning. PyTorch runs channels last with cuDNN's heuristics, bias and
ReLU in passes of their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from caffepy.backend import Geometry
from caffepy.backend.cuda.backend import CudaBackend
from caffepy.backend.cuda.convolution.autotune import Stopwatch, noise
from caffepy.backend.cuda.device import cupy

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None


@dataclass(frozen=True)
class Layer:
    """A convolution of square images and windows, and how often the net has it."""

    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int = 1
    pad: int = 0
    count: int = 1
    group: int = 1


def _resnet50() -> list[Layer]:
    layers = [Layer(3, 224, 64, 7, 2, 3)]
    channels = 64
    for size, width, blocks in ((56, 64, 3), (28, 128, 4), (14, 256, 6), (7, 512, 3)):
        stride = 1 if size == 56 else 2
        first = size * stride
        layers += [
            Layer(channels, first, 4 * width, 1, stride),
            Layer(channels, first, width, 1),
            Layer(width, first, width, 3, stride, 1),
            Layer(4 * width, size, width, 1, count=blocks - 1),
            Layer(width, size, width, 3, 1, 1, count=blocks - 1),
            Layer(width, size, 4 * width, 1, count=blocks),
        ]
        channels = 4 * width
    return layers


def _mobilenet() -> list[Layer]:
    """The depthwise ones and the products between them."""
    layers = [Layer(3, 224, 32, 3, 2, 1)]
    channels, size = 32, 112
    for width, stride, count in (
        (64, 1, 1),
        (128, 2, 1),
        (128, 1, 1),
        (256, 2, 1),
        (256, 1, 1),
        (512, 2, 1),
        (512, 1, 5),
        (1024, 2, 1),
        (1024, 1, 1),
    ):
        layers.append(Layer(channels, size, channels, 3, stride, 1, count, channels))
        size //= stride
        layers.append(Layer(channels, size, width, 1, count=count))
        channels = width
    return layers


def _vgg16() -> list[Layer]:
    layers, channels = [], 3
    for size, width, count in ((224, 64, 2), (112, 128, 2), (56, 256, 3), (28, 512, 3), (14, 512, 3)):
        layers.append(Layer(channels, size, width, 3, 1, 1))
        layers.append(Layer(width, size, width, 3, 1, 1, count - 1))
        channels = width
    return layers


NETS: dict[str, tuple[int, tuple[str, ...], list[Layer]]] = {
    "resnet50": (256, ("float16", "float32"), _resnet50()),
    "vgg16": (128, ("float16",), _vgg16()),
    "mobilenet": (128, ("float16", "float32"), _mobilenet()),
    "depthwise": (128, ("float16", "float32"), [layer for layer in _mobilenet() if layer.group > 1]),
    "caffenet": (
        256,
        ("float16", "float32"),
        [
            Layer(3, 227, 96, 11, 4),
            Layer(96, 27, 256, 5, 1, 2, group=2),
            Layer(256, 13, 384, 3, 1, 1),
            Layer(384, 13, 384, 3, 1, 1, group=2),
            Layer(384, 13, 256, 3, 1, 1, group=2),
        ],
    ),
    "lenet": (64, ("float32",), [Layer(1, 28, 20, 5), Layer(20, 12, 50, 5)]),
    "cifar10_quick": (
        100,
        ("float32",),
        [Layer(3, 32, 32, 5, 1, 2), Layer(32, 16, 32, 5, 1, 2), Layer(32, 8, 64, 5, 1, 2)],
    ),
}
"""Batch, dtypes and convolutions of each net; float32 is multiplied in TF32."""

COLUMNS = ("forward", "bias+relu", "sums", "data", "weights")


def ours(backend: CudaBackend, layer: Layer, batch: int, dtype: str) -> dict[str, Callable[[], None]]:
    """What each column measures, by our backend."""
    window = ((layer.kernel,) * 2, (layer.stride,) * 2, (layer.pad,) * 2, (1, 1), layer.group)
    x_shape = (batch, layer.channels, layer.size, layer.size)
    weights_shape = (layer.outputs, layer.channels // layer.group, layer.kernel, layer.kernel)
    plan: Any = backend.plan_convolution(x_shape, weights_shape, Geometry(*window), dtype)
    x, weights, y = (noise(shape, plan.problem.array_dtype) for shape in (x_shape, weights_shape, plan.problem.y))
    dweights, bias = noise(weights_shape, "float32"), noise((layer.outputs,), "float32")
    sums = backend.zeros((2, layer.outputs))
    work = {
        "forward": lambda: plan.forward(x, weights, None, y),
        "bias+relu": lambda: plan.forward(x, weights, bias, y, relu=True),
        "weights": lambda: plan.backward_weights(x, y, dweights, False),
    }
    if plan.gives_sums:
        work["sums"] = lambda: plan.forward(x, weights, None, y, sums=sums)
    if layer.channels > 3:
        dx = noise(x_shape, plan.problem.array_dtype)
        work["data"] = lambda: plan.backward_data(y, weights, dx)
    return work


def theirs(layer: Layer, batch: int, dtype: str) -> dict[str, Callable[[], None]]:
    """The same by PyTorch."""
    kind = torch.float16 if dtype == "float16" else torch.float32
    last = {"memory_format": torch.channels_last}

    def made(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(kind).contiguous(**last)

    x = made(batch, layer.channels, layer.size, layer.size)
    weights = made(layer.outputs, layer.channels // layer.group, layer.kernel, layer.kernel)
    bias = torch.randn(layer.outputs, device="cuda").to(kind)
    window = {"stride": layer.stride, "padding": layer.pad, "groups": layer.group}
    dy = torch.randn_like(F.conv2d(x, weights, **window)).contiguous(**last)

    def gradient(data: bool) -> Any:
        sides = ([layer.stride] * 2, [layer.pad] * 2, [1, 1], False, [0, 0], layer.group)
        return torch.ops.aten.convolution_backward(dy, x, weights, None, *sides, [data, not data, False])

    work = {
        "forward": lambda: F.conv2d(x, weights, **window),
        "bias+relu": lambda: F.relu_(F.conv2d(x, weights, bias, **window)),
        "weights": lambda: gradient(False),
    }
    if layer.channels > 3:
        work["data"] = lambda: gradient(True)
    return work


def total(layers: list[Layer], work: Callable[[Layer], dict[str, Callable[[], None]]]) -> dict[str, float]:
    """Milliseconds of a net's convolutions in each column."""
    sums: dict[str, float] = {}
    for layer in layers:
        for column, run in work(layer).items():
            run()
            sums[column] = sums.get(column, 0.0) + layer.count * min(Stopwatch(run).elapsed(10) for _ in range(3)) / 1e3
    return sums


def report(name: str, sums: dict[str, float], note: str = "") -> None:
    """One line of the table."""
    cells = "".join(f"{sums[column]:>11.3f}" if column in sums else f"{'-':>11}" for column in COLUMNS)
    print(f"{name:<34}{cells}  {note}", flush=True)


def measure_ours(net: str, dtype: str, autotune: bool) -> None:
    """Our line for a net."""
    batch, _, layers = NETS[net]
    backend = CudaBackend(0, "tf32", autotune, deterministic=False)
    with backend.activate():
        begin = time.perf_counter()
        sums = total(layers, lambda layer: ours(backend, layer, batch, dtype))
        note = f"{time.perf_counter() - begin:.1f} s with planning"
        report(f"{net} {batch} {dtype}{'' if autotune else ', heuristics'}", sums, note)
    backend.close()


def measure_theirs(net: str, dtype: str) -> None:
    """PyTorch's line."""
    batch, _, layers = NETS[net]
    torch.backends.cudnn.allow_tf32 = True
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        sums = total(layers, lambda layer: theirs(layer, batch, dtype))
        report(f"{net} {batch} {dtype}, PyTorch", sums)


def main() -> None:
    """Measure the nets that were named, or all."""
    print(f"{'milliseconds':<34}" + "".join(f"{column:>11}" for column in COLUMNS))
    for net in sys.argv[1:] or NETS:
        for dtype in NETS[net][1]:
            measure_ours(net, dtype, autotune=False)
            measure_ours(net, dtype, autotune=True)
            if torch:
                measure_theirs(net, dtype)


if __name__ == "__main__":
    main()
