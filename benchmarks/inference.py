"""Inference beside PyTorch's: milliseconds of a forward pass and GiB, from the same run, each in a process of its own.

    python benchmarks/inference.py [--rows resnet50:FLOAT:1,mobilenet:FLOAT16:64] [--ours-only] [--kernels] [--pycaffe]

A row is net, dtype and batch. Every figure is the median of five groups of passes; images lie on the device and the
result stays there. "call" is `caffepy.load`'s model called with a NumPy array, result as NumPy array; `--pycaffe` adds
pycaffe's `Net.forward` called so, and the same layer by layer.
PyTorch's net is built from the same deploy net (benchmarks/peers) and runs channels last with TF32, as one CUDA graph
and compiled (`reduce-overhead`); our ratio is to the better.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from gpu_train import print_kernels
from ours import make_model, predict, pycaffe
from processes import LIMIT, in_a_process, repeated

TORCH = str(Path(__file__).resolve().parent / "peers" / "torch_run.py")
ROWS = (
    "resnet50:FLOAT:1",
    "resnet50:FLOAT16:1",
    "mobilenet:FLOAT:1",
    "mobilenet:FLOAT16:1",
    "resnet50:FLOAT16:64",
    "resnet50:FLOAT:64",
)
PEERS = ("graph", "compile")


def job_of(row: str) -> dict[str, Any]:
    """What is measured."""
    name, kind, batch = row.split(":")
    return {"name": name, "train": False, "batch": int(batch), "device": "gpu", "dtype": kind, "limit": LIMIT}


def show_kernels(row: str) -> None:
    """Where our time goes."""
    name, kind, batch = row.split(":")
    model, arrays = make_model(name, kind, int(batch), 0)
    model(**arrays)
    model(**arrays)
    executor = next(iter(model._executors.values()))
    with model.backend.activate():
        passes = repeated(executor.forward, model.backend.synchronize)
        print_kernels(lambda: passes(20), 20)


def theirs(row: str, mode: str, python: str) -> dict[str, Any] | str:
    """PyTorch's pass."""
    from peers.description import describe

    job = job_of(row)
    job |= {"description": describe(job["name"], False, job["batch"]), "mode": mode}
    return in_a_process([python, TORCH], job, LIMIT + 60, python != sys.executable)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="where our time goes")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--pycaffe", action="store_true", help="calls of pycaffe's Net.forward too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        if arguments.kernels:
            show_kernels(arguments.row)
        if arguments.pycaffe:
            print(json.dumps(pycaffe(job_of(arguments.row))))
            return
        print(json.dumps(predict(job_of(arguments.row))))
        return
    for row in arguments.rows.split(","):
        compare(row, arguments)


def compare(row: str, arguments: argparse.Namespace) -> None:
    """PyTorch's lines of a row, and ours."""
    best = None
    for peer in () if arguments.ours_only else PEERS:
        found = theirs(row, peer, arguments.torch)
        if isinstance(found, str):
            print(f"{row:24} PyTorch {peer}: {found}", flush=True)
            continue
        print(f"{row:24} PyTorch {peer:10} {found['ms']:8.3f} ms {found['gib']:6.2f} GiB", flush=True)
        best = min(found["ms"], best or found["ms"])
    mine = in_a_process([sys.executable, __file__, "--row", row, *(["--kernels"] if arguments.kernels else [])])
    if isinstance(mine, str):
        print(f"{row:24} caffepy: {mine}", flush=True)
        return
    ratio = f"  {mine['ms'] / best:.2f} of PyTorch's best" if best else ""
    print(
        f"{row:24} caffepy            {mine['ms']:8.3f} ms {mine['gib']:6.2f} GiB{ratio}  "
        f"call {mine['call']:.3f} ms, ready after {mine['ready']:.1f} s, captured: {mine['captured']}",
        flush=True,
    )
    if arguments.pycaffe:
        found = in_a_process([sys.executable, __file__, "--pycaffe", "--row", row])
        text = (
            found if isinstance(found, str) else f"call {found['call']:.3f} ms, layer by layer {found['plain']:.3f} ms"
        )
        print(f"{row:24} pycaffe            {text}", flush=True)


if __name__ == "__main__":
    main()
