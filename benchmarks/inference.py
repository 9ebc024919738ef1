"""Inference beside PyTorch's: milliseconds of a forward pass and GiB, from the same run, each in a process of its own.

    python benchmarks/inference.py [--rows resnet50:FLOAT:1,mobilenet:FLOAT16:64] [--ours-only] [--kernels]

A row is net, dtype and batch. Every figure is the median of five groups of passes; images lie on the device and the
result stays there. "call" is `caffepy.load`'s model called with a NumPy array, result as NumPy array.
PyTorch runs channels last with TF32, as one CUDA graph and compiled (`reduce-overhead`); our ratio is to the better.

What was learnt on an H200:
- A layer launched from Python costs some 70 us, whatever it computes: ResNet-50 with one image took 12.6 ms layer by
  layer. Folded and as one graph it takes 0.387 (FLOAT16: 0.350), MobileNet 0.138 instead of 5.3.
- With 64 images in FLOAT16 ResNet-50 takes 1.95 ms folded and captured, 15.8 before.
- A call with pageable arrays took 0.58 ms for one image and 4.35 for 64 in FLOAT16: 2.4 ms brought 38.5 MB to the
  device and the result back. That is why calls go through pinned memory now.
- What a call costs in Python, without any device's work, is about 30 us.
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
sys.path.insert(0, str(Path(__file__).resolve().parent))
GIB = 2**30
ROWS = (
    "resnet50:FLOAT:1", "resnet50:FLOAT16:1", "mobilenet:FLOAT:1", "mobilenet:FLOAT16:1", "resnet50:FLOAT16:64",
    "resnet50:FLOAT:64",
)  # fmt: skip
PEERS = ("graph", "compile")
LIMIT = 240
"""Seconds that one measurement may take."""


def measure(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Median milliseconds of a pass."""
    run()
    wait()
    begin = time.perf_counter()
    run()
    wait()
    count = max(5, min(300, int(0.2 / (time.perf_counter() - begin))))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        times.append((time.perf_counter() - begin) / count * 1e3)
    return statistics.median(times)


def ours(row: str, kernels: bool) -> dict[str, Any]:
    """Our pass, and a whole call."""
    import cupy
    import numpy as np
    from gpu_train import print_kernels

    import caffepy

    name, kind, batch = row.split(":")
    begin = time.perf_counter()
    dtype = {"FLOAT": "float32", "FLOAT16": "float16"}[kind]
    model = caffepy.load(ROOT / "models" / name / "deploy.prototxt", device=0, dtype=dtype)
    generator = np.random.default_rng(1)
    with model.backend.activate():
        for layer in model.net.layers:
            for index, blob in enumerate(layer.blobs):
                if layer.type in ("BatchNorm", "Scale"):  # statistics of numbers that are normal already
                    model.backend.fill(blob.data, float(index > 0 if layer.type == "BatchNorm" else index == 0))
                    continue
                spread = (2 / max(1, np.prod(blob.shape[1:]))) ** 0.5
                model.backend.from_host(generator.standard_normal(blob.shape, np.float32) * spread, blob.data)
    shape = (int(batch), *next(iter(model.inputs.values()))[1:])
    images = generator.standard_normal(shape, np.float32)
    model(images)
    model(images)
    ready = time.perf_counter() - begin
    runner = next(iter(model._runners.values()))
    with model.backend.activate():
        milliseconds = measure(runner.forward, model.backend.synchronize)
        if kernels:
            print_kernels(lambda: [runner.forward() for _ in range(20)], 20)
    call = measure(lambda: model(images), lambda: None)
    pool = cupy.get_default_memory_pool()
    return {
        "ms": milliseconds,
        "call": call,
        "gib": pool.used_bytes() / GIB,
        "ready": ready,
        "captured": runner.captured,
    }


def theirs(row: str, mode: str) -> dict[str, Any]:
    """PyTorch's pass."""
    import torch
    from gpu_train import torch_net

    name, kind, batch = row.split(":")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.float16 if kind == "FLOAT16" else torch.float32
    net = torch_net(name).cuda().eval().to(memory_format=torch.channels_last, dtype=dtype)
    images = torch.randn(int(batch), 3, 224, 224, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        run: Callable[[], Any]
        if mode == "graph":
            for _ in range(4):
                net(images)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                net(images)
            run = graph.replay
        else:
            compiled = torch.compile(net, mode="reduce-overhead")

            def run() -> Any:
                return compiled(images)

        for _ in range(5):
            run()
        milliseconds = measure(run, torch.cuda.synchronize)
    return {"ms": milliseconds, "gib": torch.cuda.max_memory_allocated() / GIB}


def in_a_process(row: str, extra: list[str]) -> dict[str, Any] | str:
    """One measurement's result, or what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--row", row, *extra], capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "took too long"
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return (done.stderr or done.stdout)[-1500:]
    if lines[:-1]:
        print("\n".join(lines[:-1]))
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="where our time goes")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        found = theirs(arguments.row, arguments.peer) if arguments.peer else ours(arguments.row, arguments.kernels)
        print(json.dumps(found))
        return
    for row in arguments.rows.split(","):
        best = None
        for peer in () if arguments.ours_only else PEERS:
            found = in_a_process(row, ["--peer", peer])
            if isinstance(found, str):
                print(f"{row:24} PyTorch {peer}: {found}", flush=True)
                continue
            print(f"{row:24} PyTorch {peer:10} {found['ms']:8.3f} ms {found['gib']:6.2f} GiB", flush=True)
            best = min(found["ms"], best or found["ms"])
        mine = in_a_process(row, ["--kernels"] if arguments.kernels else [])
        if isinstance(mine, str):
            print(f"{row:24} caffepy: {mine}", flush=True)
            continue
        ratio = f"  {mine['ms'] / best:.2f} of PyTorch's best" if best else ""
        print(
            f"{row:24} caffepy            {mine['ms']:8.3f} ms {mine['gib']:6.2f} GiB{ratio}  "
            f"call {mine['call']:.3f} ms, ready after {mine['ready']:.1f} s, captured: {mine['captured']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
