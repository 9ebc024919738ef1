"""Convolution, pooling and LRN on the CPU over a grid of shapes: caffepy's time beside PyTorch's.

    python benchmarks/cpu_shapes.py [--torch /path/to/python] [--threads 2] [--rounds 3] [--limit 1.2] [--avx2] [name]

Each layer of the grid (`shape_cases.py`) is run forward, for the gradient of its bottom and for that of its weights,
each by itself. caffepy runs its layers; PyTorch runs the same shapes in a process of its own, by another interpreter if
PyTorch is not installed beside caffepy, both in its plain layout and channels last, of which the faster counts. The two
sides take turns; a figure is the median over the rounds of each round's median, a ratio the median of the rounds'
ratios. Names are matched by their beginnings. `--avx2` keeps both sides to vectors of eight. At the end the rows above
`--limit` are named, the worst first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.torch_shapes import Passes, torch_passes
from processes import narrow_vectors
from shape_cases import CASES, Case, layer_text

ROOT = Path(__file__).resolve().parent.parent
GROUP_SECONDS = 0.02
GROUPS = 3


# -- caffepy --------------------------------------------------------------------------------------------------


def caffepy_passes(case: Case, threads: int) -> Passes:
    """The passes of caffepy's layer."""
    import numpy as np
    from google.protobuf import text_format

    from caffepy.backend import create_backend
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.layer import LayerContext
    from caffepy.net import Net

    shape = " ".join(f"dim: {size}" for size in case.x)
    text = f'force_backward: true layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {shape} }} }} }}'
    text += f'layer {{ name: "y" bottom: "x" top: "y" {layer_text(case)} }}'
    backend = create_backend(None, threads)
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN, 1))
    layer, (x, y) = net.layers[-1], (net.blobs["x"], net.blobs["y"])
    random = np.random.default_rng(0)
    backend.from_host(random.standard_normal(x.shape, dtype=np.float32), x.data)
    layer.forward([x], [y])
    backend.from_host(random.standard_normal(y.shape, dtype=np.float32), y.diff)

    def backward(down: bool) -> None:
        layer.propagate_to_params = [not down] * len(layer.blobs)
        layer.backward([y], [down], [x])

    passes: Passes = {"forward": lambda: layer.forward([x], [y]), "data": lambda: backward(True)}
    return {**passes, "weights": lambda: backward(False)} if layer.blobs else passes


# -- the comparison -------------------------------------------------------------------------------------------


def serve(threads: int) -> None:
    """Answer each case number on a line of the input with PyTorch's times."""
    import torch

    torch.set_num_threads(threads)
    for line in sys.stdin:
        case = CASES[int(line)]
        kinds = (False,) if len(case.x) == 3 else (False, True)
        layouts = [measure(torch_passes(case, last), threads) for last in kinds]
        print(json.dumps({name: min(times[name] for times in layouts) for name in layouts[0]}), flush=True)


def measure(passes: Passes, threads: int) -> dict[str, float]:
    """Milliseconds of each pass, the median of several groups."""
    # With one thread it is the processor's time, which other programs disturb less; several spin while they wait.
    clock = time.process_time if threads == 1 else time.perf_counter
    return {name: 1000 * _median_seconds(run, clock) for name, run in passes.items()}


def _median_seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    run()
    start = clock()
    run()
    count = max(1, min(200, int(GROUP_SECONDS / max(1e-6, clock() - start))))
    times = []
    for _ in range(GROUPS):
        start = clock()
        for _ in range(count):
            run()
        times.append((clock() - start) / count)
    return statistics.median(times)


@contextmanager
def peer(interpreter: str, threads: int) -> Iterator[Callable[[int], dict[str, float]]]:
    """A process that measures PyTorch: asks it for the times of a case."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONPATH", None)
    command = [interpreter, str(Path(__file__).resolve()), "--serve", "--threads", str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def ask(number: int) -> dict[str, float]:
            requests.write(f"{number}\n")
            requests.flush()
            line = replies.readline()
            if not line:
                raise SystemExit(f"{interpreter} cannot measure '{CASES[number].name}': has it PyTorch?")
            result: dict[str, float] = json.loads(line)
            return result

        try:
            yield ask
        finally:
            requests.close()


def compare(number: int, ask: Callable[[int], dict[str, float]], options: argparse.Namespace) -> dict[str, float]:
    """Print a case's row; the ratio of each of its passes."""
    case = CASES[number]
    passes = caffepy_passes(case, options.threads)
    rounds = [(measure(passes, options.threads), ask(number)) for _ in range(options.rounds)]
    ratios, columns = {}, []
    for name in passes:
        ours, theirs = (statistics.median(sides[i][name] for sides in rounds) for i in (0, 1))
        ratios[name] = statistics.median(a[name] / b[name] for a, b in rounds)
        columns.append(f"{ours:9.3f} {theirs:9.3f} {ratios[name]:6.2f}")
    print(f"{case.name:30}" + " |".join(columns), flush=True)
    return ratios


def report(table: dict[str, dict[str, float]], limit: float) -> None:
    """Name the rows above the limit, the worst first."""
    ratios = {f"{name}, {kind}": ratio for name, row in table.items() for kind, ratio in row.items()}
    worst = sorted(ratios, key=lambda name: -ratios[name])
    print(f"\nmedian of {len(ratios)} ratios {statistics.median(ratios.values()):.2f}; above {limit}, the worst first:")
    for name in [name for name in worst if ratios[name] > limit] or worst[:1]:
        print(f"{ratios[name]:7.2f}  {name}")


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of the rows' names; all by default")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument(
        "--avx2", action="store_true", help="vectors of eight on both sides, whatever the processor has"
    )
    parser.add_argument("--serve", action="store_true", help="be the peer")
    options = parser.parse_args()
    if options.avx2:
        narrow_vectors()
    if options.serve:
        serve(options.threads)
        return
    sys.path.insert(0, str(ROOT))
    title = f"{'caffepy':>9} {'PyTorch':>9} {'ratio':>6}"
    print(" " * 30 + "milliseconds forward, for the gradient of the bottom, for that of the weights")
    print(" " * 30 + " |".join([title] * 3))
    table = {}
    with peer(options.torch, options.threads) as ask:
        for number, case in enumerate(CASES):
            if not options.names or case.name.startswith(tuple(options.names)):
                table[case.name] = compare(number, ask, options)
    report(table, options.limit)


if __name__ == "__main__":
    main()
