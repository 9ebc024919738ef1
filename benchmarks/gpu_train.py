"""One training iteration on one GPU, ours beside PyTorch's: milliseconds, images/s and peak memory, from the same run.

    python benchmarks/gpu_train.py [--rows resnet50:FLOAT16,lenet:FLOAT] [--ours-only] [--kernels]

Every figure is the median of five groups of iterations: forward, loss, backward, SGD with momentum and weight decay,
images already on the device. Memory is that of live arrays, ours while it trains and PyTorch's peak, and behind it what
the process holds of the device with what its allocator keeps. Each runs in a process of its own. PyTorch's net is built
from the same prototxt (benchmarks/peers), with all its losses. It runs eagerly, as one CUDA graph, compiled, and both
of these, always channels last with TF32; our ratio is to the best of these. `--kernels` prints where our iteration's
time goes (PyTorch's profiler is needed). `benchmarks/zoo.py` has all nets, inference and the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ours import make_solver, memory, steps_of
from processes import LIMIT, in_a_process, measure
from zoo_nets import CASES

TORCH = str(Path(__file__).resolve().parent / "peers" / "torch_run.py")
ROWS = (
    "resnet50:FLOAT16",
    "resnet50:FLOAT",
    "vgg16:FLOAT16",
    "vgg16:FLOAT",
    "caffenet:FLOAT16",
    "caffenet:FLOAT",
    "cifar10_quick:FLOAT",
    "lenet:FLOAT",
    "googlenet:FLOAT16",
    "googlenet:FLOAT",
    "resnet18:FLOAT16",
    "resnet18:FLOAT",
    "mobilenet:FLOAT16",
    "mobilenet:FLOAT",
)
PEERS = {
    "FLOAT16": ("fp16 eager", "fp16 graph", "fp16 compile", "fp16 compile graph", "bf16 compile"),
    "FLOAT": ("fp32 eager", "fp32 graph", "fp32 compile", "fp32 compile graph"),
}
"""Dtype of PyTorch's products and how it runs; all of them channels last."""
DTYPES = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
BEST_PEERS = {
    "resnet50:FLOAT16": ("bf16 compile",),
    "resnet50:FLOAT": ("fp32 compile",),
    "vgg16:FLOAT16": ("fp16 compile",),
    "mobilenet:FLOAT16": ("fp16 compile", "fp16 graph"),
    "mobilenet:FLOAT": ("fp32 compile", "fp32 graph"),
}
"""Where it is known that the others are slower; for the rest it is one CUDA graph, alone and compiled."""


# -- ours -------------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds and GiB of our iteration."""
    from caffepy.backend import create_backend
    from caffepy.utils.options import ExecutionOptions

    name, kind = arguments.row.split(":")
    engine = ExecutionOptions(
        arguments.eager, not arguments.no_fuse, not arguments.no_share, deterministic=not arguments.no_deterministic
    )
    start = time.perf_counter()
    backend = create_backend(0, math=arguments.math, deterministic=engine.deterministic)
    with backend.activate():
        solver = make_solver(name, kind, arguments.batch or CASES[name].gpu, backend, engine)
        steps = steps_of(solver)
        steps(2)
        ready = time.perf_counter() - start
        milliseconds = measure(steps)
        if arguments.kernels:
            print_kernels(lambda: steps(3), 3)
        found = {"ms": milliseconds, **memory("gpu"), "ready": ready, "loss": solver.net.loss()}
        found["captured"] = solver.graph_executor.captured
        solver.close()
    return found


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


# -- the table --------------------------------------------------------------------------------------------


def theirs(row: str, mode: str, arguments: argparse.Namespace) -> dict[str, float] | str:
    """PyTorch's iteration."""
    from peers.description import describe

    name = row.split(":")[0]
    description = describe(name, True, arguments.batch or CASES[name].gpu)
    job = {"description": description, "device": "gpu", "dtype": DTYPES[mode[:4]], "mode": mode[5:], "limit": LIMIT}
    return in_a_process([arguments.torch, TORCH], job, LIMIT + 60, arguments.torch != sys.executable)


def show(row: str, who: str, found: dict[str, float] | str, batch: int, best: float | None = None) -> None:
    """One line of the table."""
    if isinstance(found, str):
        print(f"{row:20} {who:26} failed: {found}", flush=True)
        return
    ratio = f"{found['ms'] / best:7.2f} of PyTorch's best" if best else ""
    extra = f"  ready after {found['ready']:.1f} s, loss {found['loss']:.4f}" if "loss" in found else ""
    print(
        f"{row:20} {who:26} {found['ms']:9.3f} ms {batch / found['ms'] * 1e3:10.0f} images/s {found['gib']:7.2f} GiB"
        f" of {found['held']:.2f}{ratio}{extra}",
        flush=True,
    )


def compare(row: str, flags: list[str], arguments: argparse.Namespace) -> None:
    """PyTorch's lines of a row, and ours."""
    name, kind = row.split(":")
    peers = PEERS[kind]
    if arguments.best_peers:
        peers = BEST_PEERS.get(row, tuple(f"{peers[0].split()[0]} {way}" for way in ("graph", "compile graph")))
    batch, results = arguments.batch or CASES[name].gpu, {}
    for mode in () if arguments.ours_only else peers:
        results[mode] = theirs(row, mode, arguments)
        show(row, f"PyTorch {mode}", results[mode], batch)
    times = [found["ms"] for found in results.values() if not isinstance(found, str)]
    mine = in_a_process([sys.executable, __file__, "--row", row, *flags])
    show(row, "caffepy", mine, batch, min(times, default=None))


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
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(ours(arguments)))
        return
    switches = ("kernels", "eager", "no_fuse", "no_share", "no_deterministic")
    flags = [f"--{switch.replace('_', '-')}" for switch in switches if getattr(arguments, switch)]
    flags += ["--math", arguments.math, "--batch", str(arguments.batch)]
    for row in arguments.rows.split(","):
        compare(row, flags, arguments)


if __name__ == "__main__":
    main()
