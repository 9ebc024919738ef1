"""All-reduces of caffepy's communicators beside PyTorch's, from the same run: microseconds and bus bandwidth.

    python benchmarks/allreduce.py --gpus 0,1          # NCCL: threads of one process, and a rank for each GPU
    python benchmarks/allreduce.py --cpu 2             # host memory: threads, and ranks over MPI; PyTorch over gloo

Every figure is a median on the slowest device. GPUs get twenty at once: ours replayed from a CUDA graph, as in
training, PyTorch's eagerly and from a graph. The ratio is to the better of these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from scaling import mpirun

SIZES = {"4K": 2**12, "256K": 2**18, "4M": 2**22, "64M": 2**26, "512M": 2**29}
LIMIT = 240
ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str]) -> str:
    """What a program prints."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": path}
    result = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=LIMIT)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout[-1000:]}{result.stderr[-3000:]}")
    return result.stdout


def ours(command: list[str]) -> dict[int, float]:
    """Seconds by size, of a `caffepy bench allreduce`."""
    rows = [line.split() for line in run(command).splitlines() if line and not line.startswith("#")]
    return {int(row[0]): float(row[3]) * 1e-6 for row in rows}


def peers(count: int, sizes: list[int]) -> dict[str, dict[int, float]]:
    """PyTorch's seconds by mode and size."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    program += [str(ROOT / "benchmarks" / "torch_parallel.py"), "allreduce", "--sizes", ",".join(map(str, sizes))]
    found: dict[str, dict[int, float]] = {}
    for line in run(program).splitlines():
        if line.startswith("{"):
            figure = json.loads(line)
            found.setdefault(f"PyTorch, {figure['mode']}", {})[figure["size"]] = figure["seconds"]
    return found


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", help="GPU numbers, separated by commas")
    parser.add_argument("--cpu", type=int, help="number of CPU devices")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--ours-only", action="store_true")
    arguments = parser.parse_args()
    bench = [sys.executable, "-m", "caffepy", "bench", "allreduce", "--sizes", arguments.sizes]
    if arguments.gpus:
        devices = arguments.gpus.split(",")
        count, threads = len(devices), [*bench, "--gpus", arguments.gpus]
        ranks = mpirun()
        for device in devices:
            ranks += ["-np", "1", *bench, "--gpus", device, ":"]
        ranks.pop()
    else:
        count = arguments.cpu or 2
        threads = [*bench, "--cpu", "--cpu-solvers", str(count)]
        ranks = [*mpirun(), "-np", str(count), *bench, "--cpu"]
    columns = {"threads": ours(threads), "ranks": ours(ranks)}
    sizes = list(columns["threads"])
    others = {} if arguments.ours_only else peers(count, sizes)
    columns |= others
    print(f"{'bytes':>12}" + "".join(f"{name + ', us':>20} {'GB/s':>8}" for name in columns), flush=True)
    for size in sizes:
        cells = "".join(
            f"{seconds[size] * 1e6:20.1f} {size / seconds[size] * 2 * (count - 1) / count / 1e9:8.1f}"
            for seconds in columns.values()
        )
        best = min((seconds[size] for seconds in others.values()), default=0.0)
        ratios = "".join(f"  {name} {columns[name][size] / best:.2f}" for name in ("threads", "ranks")) if best else ""
        print(f"{size:12}{cells}{ratios and '   time to the best of PyTorch:' + ratios}", flush=True)


if __name__ == "__main__":
    main()
