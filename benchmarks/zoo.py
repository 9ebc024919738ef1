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

H200s, `--quick`, PyTorch as a CUDA graph and compiled (in training both at once): training of 26 rows 0.41 to 0.97,
median 0.74; inference of one image in FLOAT 0.43 to 0.95, median of 20 nets 0.73; of 64 images in FLOAT16 0.45 to 0.95,
median of 20 nets 0.75: tables in docs/gpu.md. `--seconds` counts what `--prepare` takes. A row whose passes are no
graphs on our side is marked: ResNet-18's training was not for long, and took 11.1 to 17.9 ms by what else the host did,
with graphs 9.3 (PyTorch 12.0).

Two threads of an AMD EPYC (Zen 5, vectors of 16), a virtual machine alone, in turns, `--quick --modes last`: 42 rows,
0.35 to 1.00, median 0.68 (training 0.60, inference of one image beside onnxruntime 0.80): table in docs/cpu.md.
`--modes last,compile`: compiled, PyTorch was slower in all nine trainings tried (by 1.08 to 1.52), ours 0.57 to 0.88 of
its best. With vectors of eight on both sides (`--avx2`), training: ResNet-18 0.64, MobileNet 0.73, ResNet-50 0.77,
DenseNet-121 0.80, MobileNet-SSD 0.88, SqueezeNet 0.54, LeNet 0.80, CIFAR-10 quick 0.73 and full 0.62, autoencoder 0.90.

Before, on Zen 4 with vectors of 16, the same in turns: training 0.64 (LRCN) to 0.96 (CIFAR-10 quick, 1.07 in a second
run); inference 0.99 to 1.04 of MobileNet, LRCN and LeNet, and 1.80 of the autoencoder, which had chosen one thread in
passes right after a pause; such passes are left out now (0.92).

What was learnt:

- One side after the other, a machine's noise changed ratios by a third: DenseNet-121's training had 0.85 and 1.07. Two
  threads beside a program that took a core suffered more than PyTorch's in one run (DenseNet-121 1.34, ResNet-50 1.11).
- Of DenseNet-121's 869 ms kernels took 762 on one thread, so two have 107 ms in which one waits: 3,000 calls of kernels
  by Python, and NumPy, which joined the sums of 121 batch normalisations in a dozen calls each. Kernels join them now,
  in memory that is not had anew each time. All passes of a batch normalisation, in turns with the commit before: 0.51
  of the time for 4 images of 128 channels of 14x14, 0.74 for 512, 0.86 for 8 of 1024, 1.01 for 4 of 256 of 56x56. What
  is left would go if training's passes were recorded as those of inference are.
- The gradient of weights of 1x1 windows ran at 70 to 80 GFLOP/s a thread, other products at 90 to 110: a tile reads 48
  bytes of each pixel, 1 KiB and more apart, and probably waited for memory. The next lines are fetched ahead in the
  order of memory, a share with each tile, and fewer lines are taken at a time, or more where the gradient itself is
  large: 0.82 to 0.89 of the time for 64 to 256 and 256 to 64 channels of 56x56 pixels, 128 to 512 and 512 to 128 of
  28x28, 1024 to 2048 with stride 2; 0.96 to 1 for 14x14. Below 1 KiB it did not pay (1.05 and 1.09).
- Single pixels of 7x7 images, 392 and more in a batch, were products that read weights where they lie, at 70 to 99
  GFLOP/s; with weights packed in each pass 0.82 to 0.95 of the time (AVX2: faster forward alone, so from 512 on).
- SSD's loss took three quarters of an iteration on a GPU where boxes were matched on the host: 23 MB of scores went
  there and their gradient came back. On the device (`backend/cuda/kernels/box_loss.cu`) it needs no sort: a radix
  selection over the bits of the losses finds those that are mined. 55.5 to 13.4 ms (SSD300), 11.7 to 2.98.
- A small net's pass is lost between kernels: recorded as one program, with neighbours for one thread joined, LeNet's
  takes 73 us on one thread and 55 on two. Beside another busy program two threads take a millisecond, so a program is
  timed on one thread and on all, now and then. The trials must not alternate: the threads fall asleep meanwhile.
- Idle threads that look for work for 0.2 ms rather than 40 us gain nothing on an idle machine and take the core from
  the thread they wait for on a busy one (LeNet's training: 47 and 23 ms).
- In the autoencoder's training e^x and log(1 + x) of the C library took 2.5 of 26 ms on one thread, without calls 0.4.
- In convolutions forward, and in the images' gradients, one thread comes to 110 to 120 GFLOP/s, as PyTorch's; in the
  weights' gradients of CIFAR-10's 5x5 kernels to 67 to 97, PyTorch's to 80 to 120: that is what is left there.
- Reading ahead in the weights of inner products, and cutting convolutions into more parts, changed nothing.
- ResNet-50 held its convolutions' weights three times, as learned, folded, and packed (90 MiB each). Now a layer's
  folded ones are freed once they are packed, the largest layer's first, so that the others' fit into what that leaves.
  170 MiB of a process are Python, NumPy, numba and LLVM: 89 after numba's import, 103 with all of ours, 159 after the
  first kernel, though it came from the cache. 73 of these are pages of LLVM's library. What was freed but not given
  back, 12 to 30 MiB, goes by malloc_trim when a pass was recorded; a garbage collection frees nothing.
- MobileNet-SSD's pass was 16 programs, cut by PriorBox and by Concat of vectors, which NumPy copied: each wakes all
  threads anew. Now it is one. On a quiet machine its convolutions run at 204 to 221 GFLOP/s on two threads: their sum
  was 11.9 of 13.2 ms.
- MobileNet's kernels take 6.1 ms on two threads, at 114 GFLOP/s a thread (what tiles reach with all in the first cache)
  its 1.14 GFLOP 5.0. The worst layers, GFLOP/s on two threads: 1x1 of 32 channels 152, of 49 pixels 182 (13 tiles of
  4), the classifier 15 (three of the four rows of its tiles were none). Tables of where rows lie cost a tile of 32
  channels a third of its time. Rows evenly apart, in tiles of 8, 7, 6, 4, 2 and 1, and single tiles shared out, each
  half of the pixels to one thread whose rows the depthwise layer behind it reads: 93 to 112 a thread. The classifier's
  4 MB come from memory. In turns with onnxruntime: MobileNet 1.15 to 0.97, MobileNet-SSD 1.08 to 1.00, SqueezeNet 1.16
  to 0.96 of its time.
- For moments MobileNet takes 11.5 ms on two threads as on one, probably while both are on one core. A trial that fell
  there chose one thread for a second and more. Beside busy programs one thread gains a twentieth at most in programs of
  some milliseconds (SqueezeNet 7.3 and 7.0), so only those below 2 ms are tried. Where a neighbour on the host takes
  caches or clock, onnxruntime too goes from 5.8 to 8.8 ms within seconds: the sides have to take turns.
- The autoencoder's kernels take 82 us: 11.3 MB of weights at 140 GB/s, from the third cache. Python took 13 us more, 8
  of them to make the arguments of the pool anew in each pass; now 3.
- Depthwise layers take 9 % of MobileNet's pass and 2 to 6 times what their products need, those of stride 2 most; the
  padded copy of the first image 40 us. Both are left; so is the depthwise layer and the 1x1 behind it in one pass.
- Built from the prototxts, the peers give our outputs within 1e-5 of the largest (VGG-16: 7e-6) and our losses within
  2e-5 (siamese net; the others 1e-6). Gradients agree within 1e-5 in the median where a net has neither batch
  normalisation nor many units; with two images they differ by up to 2.6 % in the median (Inception-v3). Rounding at the
  kinks of ReLU is the likely cause, which has not been shown. ResNet-152's training has not been compared.
- A GPU's row takes seconds where kernels must be compiled and tuned first; a second run finds both in the cache.
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
