"""One training iteration on one GPU, ours beside PyTorch's: milliseconds, images/s and peak memory, from the same run.

    python benchmarks/gpu_train.py [--rows resnet50:FLOAT16,lenet:FLOAT] [--ours-only] [--kernels]

Every figure is the median of five groups of iterations: forward, loss, backward, SGD with momentum and weight decay,
images already on the device. Memory is that of live arrays, ours while it trains and PyTorch's peak, and behind it what
the process holds of the device with what its allocator keeps. Each runs in a process of its own. PyTorch runs eagerly,
as one CUDA graph and compiled, always channels last with TF32; our ratio is to the best of these.
`--kernels` prints where our iteration's time goes (PyTorch's profiler is needed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
GROUPS = 5
LIMIT = 280
"""Seconds that one measurement may take."""

Shape = tuple[int, int, int]
NETS: dict[str, tuple[str, int, Shape, int]] = {
    "resnet50": ("resnet50/train_val.prototxt", 256, (3, 224, 224), 1000),
    "vgg16": ("vgg16/train_val.prototxt", 128, (3, 224, 224), 1000),
    "caffenet": ("caffenet/train_val.prototxt", 256, (3, 227, 227), 1000),
    "quick": ("cifar10/quick_train_test.prototxt", 100, (3, 32, 32), 10),
    "lenet": ("lenet/train_test.prototxt", 64, (1, 28, 28), 10),
    "googlenet": ("googlenet/train_val.prototxt", 128, (3, 224, 224), 1000),
    "mobilenet": ("mobilenet/train_val.prototxt", 128, (3, 224, 224), 1000),
    "resnet18": ("resnet18/train_val.prototxt", 256, (3, 224, 224), 1000),
}
"""Prototxt below models/, batch, shape of an image, classes."""
ROWS = (
    "resnet50:FLOAT16", "resnet50:FLOAT", "vgg16:FLOAT16", "caffenet:FLOAT16", "caffenet:FLOAT", "quick:FLOAT",
    "lenet:FLOAT", "googlenet:FLOAT16", "resnet18:FLOAT16", "mobilenet:FLOAT16", "mobilenet:FLOAT",
)  # fmt: skip
PEERS = {
    "FLOAT16": ("fp16", "fp16 graph", "fp16 compile", "bf16 compile"),
    "FLOAT": ("fp32", "fp32 graph", "fp32 compile"),
}
BEST_PEERS = {
    "resnet50:FLOAT16": ("bf16 compile",), "resnet50:FLOAT": ("fp32 compile",), "vgg16:FLOAT16": ("fp16 compile",),
    "mobilenet:FLOAT16": ("fp16 compile", "fp16 graph"), "mobilenet:FLOAT": ("fp32 compile", "fp32 graph"),
}  # fmt: skip
"""Where it is known that the others are slower; for the rest it is one CUDA graph."""
SMALL = ("quick", "lenet")


def iterations(net: str) -> int:
    """Iterations in a group."""
    return 300 if net in SMALL else 15


def measure(step: Callable[[int], None], count: int) -> float:
    """Median milliseconds of an iteration; `step` makes so many iterations and waits for them."""
    step(10)
    times = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        step(count)
        times.append((time.perf_counter() - start) / count * 1e3)
    return statistics.median(times)


# -- ours -------------------------------------------------------------------------------------------------


def make_solver(name: str, kind: str, batch: int, engine: Any, math: str) -> Any:
    """A solver of one of the models, with made-up images on the device."""
    import numpy as np

    from caffepy.backend import create_backend
    from caffepy.config.load import read_net
    from caffepy.proto import caffe_pb2
    from caffepy.solvers import create_solver

    prototxt, _, shape, classes = NETS[name]
    net = read_net(ROOT / "models" / prototxt)
    layers = [layer for layer in net.layer if layer.type != "Data"]
    del net.layer[:]
    source = net.layer.add(name="data", type="DummyData", top=["data", "label"])
    source.dummy_data_param.shape.add(dim=(batch, *shape))
    source.dummy_data_param.shape.add(dim=(batch,))
    net.layer.extend(layers)
    net.default_forward_type = net.default_backward_type = caffe_pb2.Type.Value(kind)
    param = caffe_pb2.SolverParameter(
        net_param=net, base_lr=1e-3, lr_policy="fixed", momentum=0.9, weight_decay=5e-4, max_iter=10**6, random_seed=1,
        snapshot_after_train=False, type="SGD",
    )  # fmt: skip
    backend = create_backend(0, math=math, deterministic=engine.deterministic)
    with backend.activate():
        solver = create_solver(param, backend, engine=engine)
        solver.net.forward()
        generator = np.random.default_rng(0)
        images = generator.standard_normal((batch, *shape), np.float32)
        backend.from_host(images, solver.net.blobs["data"].data)
        backend.from_host(generator.integers(0, classes, batch).astype(np.float32), solver.net.blobs["label"].data)
    return solver


def ours(arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds and GiB of our iteration."""
    import cupy

    from caffepy.solvers.execution_options import ExecutionOptions

    name, kind = arguments.row.split(":")
    engine = ExecutionOptions(
        arguments.eager, not arguments.no_fuse, not arguments.no_share, deterministic=not arguments.no_deterministic
    )
    start = time.perf_counter()
    solver = make_solver(name, kind, arguments.batch or NETS[name][1], engine, arguments.math)
    with solver.backend.activate():

        def step(count: int) -> None:
            solver.step(count)
            solver.backend.synchronize()

        step(2)
        ready = time.perf_counter() - start
        milliseconds = measure(step, iterations(name))
        if arguments.kernels:
            print_kernels(lambda: step(3), 3)
        pool = cupy.get_default_memory_pool()
        used, held = pool.used_bytes() / GIB, pool.total_bytes() / GIB
        loss = solver.net.loss()
        captured = solver.graph_runner.captured
        solver.close()
    return {"ms": milliseconds, "gib": used, "held": held, "ready": ready, "loss": loss, "captured": captured}


def print_kernels(work: Callable[[], None], count: int) -> None:
    """Where the device's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
    rows = [(e.key, e.count / count, e.self_device_time_total / count / 1e3) for e in found.key_averages()]
    total = sum(row[2] for row in rows)
    print(f"{total:9.3f} ms in kernels")
    for key, calls, milliseconds in sorted(rows, key=lambda row: -row[2])[:45]:
        print(f"{milliseconds:9.3f} ms {calls:7.1f} calls  {key[:150]}")


# -- PyTorch's --------------------------------------------------------------------------------------------


def torch_net(name: str) -> Any:
    """The same net in PyTorch."""
    from torch import nn

    def pooling(kind: Any, size: int = 3) -> Any:
        return kind(size, 2, ceil_mode=True)

    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 20, 5), pooling(nn.MaxPool2d, 2), nn.Conv2d(20, 50, 5), pooling(nn.MaxPool2d, 2), nn.Flatten(),
            nn.Linear(800, 500), nn.ReLU(True), nn.Linear(500, 10),
        )  # fmt: skip
    if name == "quick":
        return nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2), pooling(nn.MaxPool2d), nn.ReLU(True), nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(True), pooling(nn.AvgPool2d), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(True), pooling(nn.AvgPool2d),
            nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10),
        )  # fmt: skip
    if name == "caffenet":
        return nn.Sequential(
            nn.Conv2d(3, 96, 11, 4), nn.ReLU(True), pooling(nn.MaxPool2d), nn.LocalResponseNorm(5),
            nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(True), pooling(nn.MaxPool2d), nn.LocalResponseNorm(5),
            nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(True), nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(True), nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(True), pooling(nn.MaxPool2d),
            nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True),
            nn.Dropout(), nn.Linear(4096, 1000),
        )  # fmt: skip
    if name == "mobilenet":
        return nn.Sequential(*_mobilenet(), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(1024, 1000))
    import torchvision

    settings = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    return getattr(torchvision.models, name)(**settings)


def _mobilenet() -> list[Any]:
    """MobileNet v1's convolutions, each with BatchNorm and ReLU."""
    from torch import nn

    def block(channels: int, outputs: int, kernel: int, stride: int, groups: int) -> list[Any]:
        convolution = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(True)]

    layers, channels = block(3, 32, 3, 2, 1), 32
    for width, stride in (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ):
        layers += block(channels, channels, 3, stride, channels) + block(channels, width, 1, 1, 1)
        channels = width
    return layers


def theirs(arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds and GiB of PyTorch's iteration."""
    import contextlib

    import torch
    import torch.nn.functional as F

    name, _ = arguments.row.split(":")
    mode = arguments.peer
    torch.backends.cudnn.benchmark = True
    _, batch, shape, classes = NETS[name]
    batch = arguments.batch or batch
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mode[:4])
    torch.backends.cuda.matmul.allow_tf32 = True
    layout = torch.channels_last
    net = torch_net(name).cuda().to(memory_format=layout)
    images = torch.randn(batch, *shape, device="cuda").to(memory_format=layout)
    labels = torch.randint(classes, (batch,), device="cuda")
    rule = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)

    def loss_of(x: Any, y: Any) -> Any:
        return F.cross_entropy(net(x), y)

    compute = torch.compile(loss_of) if "compile" in mode else loss_of

    def iteration() -> None:
        with torch.autocast("cuda", half) if half is not None else contextlib.nullcontext():
            loss = compute(images, labels)
        loss.backward()
        rule.step()
        rule.zero_grad(set_to_none="compile" in mode)

    run = iteration
    if "graph" in mode:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                iteration()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            iteration()
        run = graph.replay

    def step(count: int) -> None:
        for _ in range(count):
            run()
        torch.cuda.synchronize()

    milliseconds = measure(step, iterations(name))
    used, held = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    return {"ms": milliseconds, "gib": used, "held": held}


# -- the table --------------------------------------------------------------------------------------------


def in_a_process(row: str, extra: list[str]) -> dict[str, float] | str:
    """One measurement's result, or what went wrong."""
    command = [sys.executable, __file__, "--row", row, *extra]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "took too long"
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return (done.stderr or done.stdout)[-1500:]
    if lines[:-1]:
        print("\n".join(lines[:-1]))
    found: dict[str, float] = json.loads(lines[-1])
    return found


def show(row: str, who: str, found: dict[str, float] | str, best: float | None = None) -> None:
    """One line of the table."""
    if isinstance(found, str):
        print(f"{row:18} {who:22} failed: {found}", flush=True)
        return
    batch = NETS[row.split(":")[0]][1]
    ratio = f"{found['ms'] / best:7.2f} of PyTorch's best" if best else ""
    extra = f"  ready after {found['ready']:.1f} s, loss {found['loss']:.4f}" if "ready" in found else ""
    print(
        f"{row:18} {who:22} {found['ms']:9.3f} ms {batch / found['ms'] * 1e3:10.0f} images/s {found['gib']:7.2f} GiB"
        f" of {found['held']:.2f}{ratio}{extra}",
        flush=True,
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--best-peers", action="store_true", help="only the fastest of PyTorch's ways for each net")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--no-share", action="store_true")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--math", default="tf32")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(theirs(arguments) if arguments.peer else ours(arguments)))
        return
    switches = ("kernels", "eager", "no_fuse", "no_share", "no_deterministic")
    flags = [f"--{switch.replace('_', '-')}" for switch in switches if getattr(arguments, switch)]
    flags += ["--math", arguments.math, "--batch", str(arguments.batch)]
    for row in arguments.rows.split(","):
        peers = PEERS[row.split(":")[1]]
        if arguments.ours_only:
            peers = ()
        elif arguments.best_peers:
            peers = BEST_PEERS.get(row, (peers[0].split()[0] + " graph",))
        results = {peer: in_a_process(row, ["--peer", peer, "--batch", str(arguments.batch)]) for peer in peers}
        for peer, found in results.items():
            show(row, f"PyTorch {peer}", found)
        times = [found["ms"] for found in results.values() if not isinstance(found, str)]
        show(row, "caffepy", in_a_process(row, flags), min(times, default=None))


if __name__ == "__main__":
    main()
