"""Every net of models/, training and inference, CPU and GPU: ours beside PyTorch and onnxruntime, from the same run.

    python benchmarks/zoo.py [--nets resnet50,lenet] [--phases train,test] [--devices cpu,gpu] [--dtypes FLOAT,FLOAT16]
        [--prototxt FILE ...] [--train-batch 8] [--batches 1,64] [--modes graph,compile] [--quick] [--prepare 5]
        [--seconds 150] [--rounds 5] [--threads 2] [--avx2] [--torch PYTHON] [--check]

A row is a net, phase, device, dtype and batch. Each measurement has a process of its own with a time limit. On the CPU
the sides of a row take turns, for `--rounds` rounds: a time is the median over the rounds of each round's median, the
ratio the median of the rounds' ratios, and who waits uses no core. With `--threads 1` a time is the processor's, which
other programs disturb less. `--avx2` keeps both sides to vectors of eight, without onnxruntime, which cannot be told.

PyTorch's net is built from the same prototxt (benchmarks/peers) and is refused where its parameters or the shape of any
blob differ from ours; `--check` compares outputs, losses and gradients instead of times. PyTorch runs eagerly, as one
CUDA graph and compiled, channels last with TF32 on a GPU, and on the CPU also in its plain layout; onnxruntime runs our
own ONNX export in inference on the CPU. The ratio is that to the fastest of these, below 1 where ours is faster.

Training is forward, loss, backward and SGD with momentum and weight decay, the inputs already there, at a rate so low
that no net diverges (FCN-8s did at 1e-4); layers with lr_mult 0 are not learned on either side. Inference is a forward
pass without the copies of inputs and outputs; onnxruntime's has these. Detectors run without DetectionOutput on both
sides. A GPU's memory is that of live arrays, ours while it runs and PyTorch's peak; the CPU's is the process's largest
resident set, PyTorch's or caffepy's library included.

`--prototxt` measures nets of your own: TRAIN's layers where there is a loss, and TEST's without losses. Inputs are made
up (net_files.py); a layer that PyTorch's side has no counterpart for is named.

`--quick` measures shorter, and of PyTorch's ways only the CUDA graph, or channels last on the CPU; `--modes` chooses
among them. On a GPU up to four processes start at the same time, and a lock lets one at a time use the device once it
has its imports behind it; `--seconds` ends what has not begun by then and says which rows are missing. `--prepare 5`
first runs what PyTorch must compile, five processes at a time, unmeasured: the measurements then find it in PyTorch's
cache, where each would compile for half a minute with the device to itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from net_files import batch_of, has_loss, is_file, short
from processes import LIMIT, Side, in_a_process, narrow_vectors
from zoo_nets import CASES

HERE = Path(__file__).resolve().parent
TORCH = HERE / "peers" / "torch_run.py"
GPU_MODES, CPU_MODES = ("eager", "graph", "compile", "compile graph"), ("plain", "last", "compile")
ROUNDS, ROUNDS_QUICK = 7, 5
"""In which the CPU's sides take turns."""
MAX_SIDES = 5
"""On the CPU."""
WORKERS = 4
"""Processes that are there at the same time on a GPU, one of which uses it."""
BATCHES = {"cpu": (1,), "gpu": (1, 64)}
"""Images of a pass."""

Found = dict[str, Any] | str


@dataclass(frozen=True)
class Row:
    """What is measured."""

    name: str
    train: bool
    device: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        phase = "train" if self.train else "test"
        return f"{short(self.name):18}{phase:6}{self.device:4}{self.dtype:9}{self.batch:4}"

    def job(self) -> dict[str, Any]:
        """For the processes."""
        return vars(self).copy()


class Budget:
    """The seconds that are left for measurements."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds if seconds else float("inf")

    def spent(self) -> bool:
        """Whether nothing more should begin."""
        return time.monotonic() >= self.end


@functools.cache
def described(name: str, train: bool, batch: int) -> dict[str, Any]:
    """The net for PyTorch."""
    from peers.description import describe

    return describe(name, train, batch)


def modes(row: Row, options: argparse.Namespace) -> tuple[str, ...]:
    """PyTorch's ways that are tried."""
    possible = _modes(row, options.quick and not options.modes)
    return tuple(mode for mode in possible if not options.modes or mode in options.modes)


def _modes(row: Row, quick: bool) -> tuple[str, ...]:
    if row.device == "gpu":
        if row.name == "lrcn" or not row.train:  # compiled inference makes CUDA graphs of its own
            return ("graph",) if quick else GPU_MODES[:3]
        return ("graph",) if quick else GPU_MODES
    return ("last",) if quick else CPU_MODES


Launch = tuple[list[str], dict[str, Any], bool]
"""Of a process: its command, its job, and whether its interpreter has modules of its own."""
OURS = [sys.executable, str(HERE / "ours.py")]


def torch_launch(row: Row, mode: str, options: argparse.Namespace) -> Launch:
    """PyTorch's measurement."""
    description = described(row.name, row.train, row.batch)
    job = {"description": description, "mode": mode, **settings(row, options)}
    return [options.torch, str(TORCH)], job, options.torch != sys.executable


def run_torch(row: Row, mode: str, options: argparse.Namespace) -> Found:
    """PyTorch's measurement, not in turns."""
    command, job, other_python = torch_launch(row, mode, options)
    return in_a_process(command, job, patience(row, options), other_python)


def run_ours(row: Row, options: argparse.Namespace) -> Found:
    """Our measurement, not in turns."""
    return in_a_process(OURS, settings(row, options), patience(row, options))


def launches(row: Row, options: argparse.Namespace, folder: str) -> Iterator[tuple[str, Launch | str]]:
    """The processes of a row on the CPU, by who it is, or why there is none."""
    for mode in () if options.ours_only else modes(row, options):
        yield f"PyTorch {mode}", torch_launch(row, mode, options)
    if not (row.train or options.ours_only or options.avx2):  # onnxruntime cannot be told to leave AVX-512
        job = {**settings(row, options), "file": str(Path(folder) / "net.onnx")}
        written = in_a_process(OURS, job, LIMIT)
        job |= {"engine": "onnxruntime", "inputs": described(row.name, False, row.batch)["inputs"]}
        yield "onnxruntime", written if isinstance(written, str) else (OURS, job, False)
    yield "caffepy", (OURS, settings(row, options), False)


def run_in_turns(row: Row, options: argparse.Namespace) -> dict[str, Found]:
    """All measurements of a row on the CPU, whose sides take turns."""
    found: dict[str, Found] = {}
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for who, launch in launches(row, options, folder):
            if isinstance(launch, str):
                found[who] = launch
                continue
            command, job, other_python = launch
            job |= {"turns": options.rounds, "limit": LIMIT * MAX_SIDES}
            sides[who] = Side(command, job, patience(row, options), other_python)
            stack.callback(sides[who].close)
        for number in range(options.rounds):
            for who, side in sides.items():
                side.take_turn()
                if number == options.rounds - 1:
                    found[who] = side.finish()
    return found


def settings(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """What all jobs of a row have."""
    lock = options.lock if row.device == "gpu" else ""
    limits = {"limit": options.limit, "avx2": options.avx2}
    return {**row.job(), "quick": options.quick, "threads": options.threads, "lock": lock, **limits}


def patience(row: Row, options: argparse.Namespace) -> int:
    """Seconds until a process is ended from outside, those before it has the device included."""
    return int(options.limit * (WORKERS if row.device == "gpu" else 1) + 60)


def prepare(wanted: list[Row], options: argparse.Namespace) -> None:
    """Let PyTorch compile what it will need; failures are seen when it is measured."""
    unlocked = argparse.Namespace(**{**vars(options), "quick": True, "lock": ""})
    with ThreadPoolExecutor(options.prepare) as pool:
        for row in wanted:
            for mode in modes(row, options):
                if "compile" in mode:
                    pool.submit(run_torch, row, mode, unlocked)


def measurements(row: Row, options: argparse.Namespace) -> list[Callable[[], dict[str, Found]]]:
    """What is to be called for a row; each gives what was found by who it is."""
    if row.device == "cpu":
        return [functools.partial(run_in_turns, row, options)]
    calls: dict[str, Callable[[], Found]] = {}
    for mode in () if options.ours_only else modes(row, options):
        calls[f"PyTorch {mode}"] = functools.partial(run_torch, row, mode, options)
    calls["caffepy"] = functools.partial(run_ours, row, options)
    return [lambda who=who, call=call: {who: call()} for who, call in calls.items()]


def trained_batch(name: str, device: str) -> int:
    """Images of an iteration."""
    found: int = batch_of(name) if is_file(name) else getattr(CASES[name], device)
    return found


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """What the command line asks for."""
    for device in options.devices:
        for name in options.nets:
            for dtype in options.dtypes if device == "gpu" else ["FLOAT"]:
                if "train" in options.phases and not (is_file(name) and not has_loss(name)):
                    yield Row(name, True, device, dtype, options.train_batch or trained_batch(name, device))
                if "test" in options.phases:
                    for batch in options.batches or BATCHES[device]:
                        yield Row(name, False, device, dtype, batch)


def ratio_of(ours: dict[str, Any], peer: dict[str, Any]) -> float:
    """Of the times; the median of the rounds' ratios where there were rounds."""
    if "rounds" not in ours:
        return float(ours["ms"] / peer["ms"])
    return statistics.median(one / other for one, other in zip(ours["rounds"], peer["rounds"], strict=True))


def show(row: Row, found: dict[str, Found]) -> float | None:
    """Print a row; the ratio if both sides were measured."""
    good = {who: each for who, each in found.items() if isinstance(each, dict)}
    for who, each in found.items():
        if isinstance(each, str):
            print(f"{row} {who}: {each.splitlines()[-1] if each else 'failed'}", flush=True)
    ours = good.pop("caffepy", None)
    best = min(good, key=lambda who: good[who]["ms"], default=None)
    others = ", ".join(f"{who} {each['ms']:.3f}" for who, each in good.items() if who != best)
    left = f"{ours['ms']:10.3f}{row.batch / ours['ms'] * 1e3:10.0f}{ours['gib']:7.2f}" if ours else f"{'-':>27}"
    right = f"{good[best]['ms']:10.3f}{good[best]['gib']:7.2f} {best:16}" if best else f"{'-':>10}{'-':>7} {'':16}"
    ratio = ratio_of(ours, good[best]) if ours and best else None
    if ours and row.device == "gpu" and not ours["captured"]:
        others = f"caffepy's passes are no graphs  {others}"
    print(f"{row}{left} {right}{f'{ratio:6.2f}' if ratio else '     -'}  {others}", flush=True)
    return ratio


def finish(ratios: dict[Row, float], missing: list[Row]) -> None:
    """The median and the worst ratios."""
    for row in missing:
        print(f"not measured: {row}")
    if ratios:
        print(f"\nmedian of {len(ratios)} ratios {statistics.median(ratios.values()):.2f}; the worst:")
        for row in sorted(ratios, key=lambda row: -ratios[row])[:10]:
            print(f"{ratios[row]:6.2f}  {row}")


def measure_all(options: argparse.Namespace) -> None:
    """The table."""
    print(f"{'':41}{'caffepy':>10}{'images/s':>10}{'GiB':>7} {'peer, ms':>10}{'GiB':>7} {'':16}{'ratio':>6}")
    budget, wanted = Budget(options.seconds), list(rows(options))
    ratios, missing = {}, []
    if options.prepare:
        prepare(wanted, options)

    def guarded(call: Callable[[], dict[str, Found]]) -> dict[str, Found] | None:
        return None if budget.spent() else call()

    workers = WORKERS if options.devices == ["gpu"] else 1
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(workers) as pool:
        options.lock = lock.name
        futures = [(row, [pool.submit(guarded, call) for call in measurements(row, options)]) for row in wanted]
        for row, parts in futures:
            found: dict[str, Found] = {}
            results = [future.result() for future in parts]
            if None in results:
                missing.append(row)
                continue
            for result in results:
                found |= result or {}
            ratio = show(row, found)
            if ratio:
                ratios[row] = ratio
    finish(ratios, missing)


def has_gpu() -> bool:
    """Whether a GPU can be seen."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.startswith(b"GPU")
    except OSError:
        return False


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nets", default="", help="all of models/ unless --prototxt says others")
    parser.add_argument("--prototxt", nargs="+", default=[], metavar="FILE", help="your own nets, as net_files.py says")
    parser.add_argument("--train-batch", type=int, default=0, help="in training; otherwise the table's or the file's")
    parser.add_argument("--phases", default="train,test")
    parser.add_argument("--devices", default="cpu,gpu" if has_gpu() else "cpu")
    parser.add_argument("--dtypes", default="FLOAT,FLOAT16", help="on a GPU")
    parser.add_argument("--batches", default="", help="in inference; otherwise 1, and 64 on a GPU")
    parser.add_argument("--modes", default="", help="PyTorch's ways, of those that there are for a row")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prepare", type=int, default=0, help="processes that compile PyTorch's nets beforehand")
    parser.add_argument("--seconds", type=float, default=0, help="after which nothing more begins")
    parser.add_argument("--limit", type=int, default=0, help="seconds of one measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU")
    parser.add_argument("--rounds", type=int, default=0, help="in which the CPU's sides take turns")
    parser.add_argument("--avx2", action="store_true", help="vectors of eight on the CPU, whatever the processor has")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--check", action="store_true", help="whether PyTorch's nets give our numbers")
    options = parser.parse_args()
    options.nets = options.nets or ",".join([] if options.prototxt else CASES)
    for field in ("nets", "phases", "devices", "dtypes"):
        setattr(options, field, getattr(options, field).split(","))
    options.nets = [name for name in options.nets if name]
    unknown = set(options.nets) - set(CASES)
    if unknown:
        parser.error(f"unknown nets {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    options.nets += [str(Path(file).resolve()) for file in options.prototxt]
    options.modes = [mode for mode in options.modes.split(",") if mode]
    options.batches = [int(batch) for batch in options.batches.split(",") if batch]
    options.rounds = options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)
    if options.avx2:
        narrow_vectors()  # for PyTorch's processes
    options.limit = options.limit or (40 if options.quick else LIMIT)
    if options.check:
        from peers.agreement import check

        raise SystemExit(0 if check(options.torch, options.nets) else 1)
    measure_all(options)


if __name__ == "__main__":
    main()
