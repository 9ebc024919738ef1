"""How long `caffepy train` takes from the command to the end of its first iteration, by phases.

    python benchmarks/start.py [--rows cpu,gpu,gpus,resnet50,googlenet] [--limit 120] [--keep FOLDER]

Rows: LeNet on the CPU, on one GPU, on two GPUs of one process and of two ranks under mpirun, ResNet-50 and GoogLeNet in
FLOAT16 on one GPU. Each runs twice: with empty caches of its own (XDG_CACHE_HOME, CUPY_CACHE_DIR, CUDA_CACHE_PATH), and
with those that the first run filled. A figure is the number of calls and their seconds, in all threads together, as
`--profile-start` logs them; phases may lie within others (kernels within tuning). `silence` is the longest time between
two lines of the log before the first iteration's end.

LeNet on the CPU with empty caches, two cores of a virtual machine, first iteration's end: 12.3 to 13.3 s at first, 5.0
to 5.4 s with the steps of this table, and with other processes 2.9 to 3.4 s in five runs, where 5.9 s were taken
without them seconds later (CPU time of all processes 5.6 s, without them 6.4). A first run whose files had to be read
from disk took 8.3. Beside programs that keep both cores busy other processes gain little: 5.3 to 6.7 s, without them
6.9 to 8.2. With full caches 0.8 to 1.1 s; CPU time 1.0 s, before 1.6 to 1.8. The steps, in CPU time of one thread (each
by itself, on a busy machine):

    24 to 25 kernels, as numba compiles them                                              13.9 s
    each function optimised and compiled once, within its kernel (jit/pipeline.py)         7.7
    arguments unpacked by the C function, not by a compiled one                            7.4
    few records and images without machine code (`Kernel.should_compile`)                            5.0
    the kernel's body not kept beside the C function it is inlined in                      4.9
    no `parallel=True`: numba's pool called directly; no rewriting of array expressions    4.0

The kernels' speed is as before: cifar10_quick on one thread 74.9, 75.8 and 77.0 ms of CPU time, now 75.6, 75.3 and
75.3; LeNet 16.0 and 15.9, now 16.5 and 15.9. Hiding functions from the linker altogether made tiles be inlined in every
kernel and cost 0.7 s more. Then, in CPU time of all processes:

    other processes foresee the kernels (0.015 s) and compile them: another import of numba    +0.7 s
    kept kernels are loaded without what numba's compiler imports (also with full caches)      -0.5
    no pass for closures in functions without any; the machine code is the same                -0.5

Compilation of all 21 kernels takes 3.5 to 4.5 s of one core: LLVM 2.3 (passes 1.3, code 1.0), the rest is numba's
typing and lowering. Two cores are busy for nine tenths of the start, so that more cores or less compilation would
shorten it: LLVM's passes at level 2 in place of 3 take 0.4 s less, and other code in every kernel; a numba target
without NumPy's functions and LLVM in threads (which goes around llvmlite's lock) took as much CPU time; without
Python's collection of garbage compilation takes as long, numba's import 0.1 s less (so the other processes do without
it). What would move it further: machine code, or the modules that LLVM optimises, made when the package is built.

Two H200s and 32 cores, seconds until the first iteration's end, with empty caches and with full ones. Before: cuDNN's
frontend imported PyTorch, softmax compiled eleven kernels where one was wanted, and NCCL connected last. Then: NVRTC
compiled one kernel after the other in the process, and cuDNN built each plan anew. Third: tuning took 4.9 s of
ResNet-50's and 18.6 of GoogLeNet's.

                                before            then              third             now
    LeNet, one GPU              16.0    5.7       10.5   2.8         4.2   1.7
    LeNet, two GPUs             18.2    5.9       13.3   4.0         7.7   2.6         (1)   1.9
    ResNet-50, FLOAT16, 128     17.6    6.0       11.1   3.3         7.3   2.4         4.2   1.6
      as the machine's first use                                    10.3   1.8         5.1
    MobileNet, FLOAT16, 128                                                            4.2
    GoogLeNet, FLOAT16, 128     33.5    8.4       28.1   5.0        18.0   2.5        12.0

The aims were 3 s for LeNet on two GPUs with full caches, and for ResNet-50 6 s with empty caches and 2 s with full
ones. (1): 11.9 s as the machine's first use; with its files read it has not been measured since.

What tuning takes, in seconds, all tasks of a net together (`--profile-start` shows it):

                                    ResNet-50, 68 tasks     GoogLeNet, 203     what was done
    cuDNN's heuristics proposed         0.8 to 0.4               2.8           only the faster ones are asked, of which
                                                                               ten plans count, where they have so many
    plans built, 76 and 373 graphs      0.1                      0.2
    first runs, with kernels' loading   0.6                      3.3           once only where it takes three times the
                                                                               best's time and 20 ms more (1 ms then)
    timed runs                          1.0 to 0.7               2.0           the device idles only as long as the
                                                                               host's launches, measured, need
    finalists                           1.8 to 0.5               2.2           those within 5 %, and two at least
    all                                 4.9 to 2.2              10.7

The candidates chosen so took, timed anew beside the choices of twenty plans a graph, each with 1 ms of runs and four
finalists: ResNet-50 0.5 % less, MobileNet 0.5 % more (one layer whose first choice was disturbed; since then the second
is always timed again), GoogLeNet 0.4 % more. The first 4, 6, 8, 10, 12 plans a graph would cost ResNet-50 0.9, 0.3,
0.15, 0.1 and 0.06 %, GoogLeNet 2.5, 0.9, 0.6, 0.5 and 0.45 %. Engines that lost by 1.25 in one to five earlier tasks,
left out, saved a tenth and cost 0.3 to 2.4 %. The heuristics of mode A take 2.8 ms a graph and list 39 plans, those of
mode B 4.5 ms and add 3. Of GoogLeNet's first runs 3 s were the tuning of convolutions without bias, to try the kernel
for bias and ReLU behind them.

The first use of a machine took 3 s more: 1.7 in tuning and 0.8 in `import cupy`, reading files as they were touched.
They are now read by two threads from the first line on (134 MB of CuPy's modules, 370 of cuDNN's libraries), which left
0.6 s. To read cuBLASLt and NVRTC as well kept `import cupy` waiting for the disk (1.5 s). `ctypes.CDLL` keeps all other
threads waiting while a library is loaded; dlopen called through ctypes does not. With full caches cuBLAS's first
product took 0.14 s; now a thread makes one while the nets are built, with which two starts took 1.5 and 1.8 s beside
1.9 and 2.2 without.

Tuning timed short runs wrongly where other threads kept the host from launching them in time: a weight gradient of
12 us was taken for 37, and ResNet-50's choices together took 3 % longer than those of a quiet run. Runs that were
launched too late are timed again.

NVRTC compiles one kernel at a time in a process, in several threads as well (measured). Each text is small: 30 to 450
ms of CPU time, of which `--minimal` saves about a tenth with the same machine code. So a net's texts are foreseen, by a
run on arrays without memory, and compiled by eight processes while the nets are built. With empty caches the first
passes then wait for kernels 0.2 s (ResNet-50, 46), 0.3 (GoogLeNet, 62) and 0.5 (LeNet, 43), before 5 to 10; to foresee
takes 0.25, 0.25 and 0.06 s, once for each net.

Tuning that left a family of candidates after five in a row that were not faster saved nothing (17 to 25 s in GoogLeNet,
noise) and chose convolutions that took 2.5 % longer in GoogLeNet, so all are tried.

Where a start with full caches went, of ResNet-50 on one H200 (all threads' stacks sampled) and LeNet on two, and what
was done about it: cuInit 0.28 s and each context 0.13, in which CuPy lets no other thread run (now the driver's own
calls, in threads from the first line on: two contexts 0.2 s together); numba and what it imports for its first function
0.4 to 0.9 s (now imported only when reading data, or a layer on the host, gains by it); fillers 0.4 s (now drawn in
threads, and by test nets only where they do not share); the net's text parsed three times, 0.1 s (once); 59 plans of
cuDNN 0.57 s, 0.19 of them its libraries (kept in its own form, 3 kB each: 0.41 s one after the other with the loading
of kernels that their first runs would do, 0.17 by cuDNN's own calls; the libraries are loaded ahead); up to sixteen
threads that read LeNet's records by Python, each keeping the two solver threads waiting (one thread, shorter turns, and
short batches at first). Of 6.4 s of tuning ResNet-50 with empty caches 2.6 are timed runs of candidates, 2.0 the
finalists, 1.4 questions to heuristics (half of them for the chosen plan once more, which is now read back) and 0.13 the
building of 1581 plans: building them in threads would gain nothing, and the binding keeps the interpreter's lock.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PHASE = re.compile(r"Start: (.+): (\d+), ([\d.]+) s, ended at ([\d.]+) s")
_END = re.compile(r"Start: the first iteration ended at ([\d.]+) s")

ROWS: dict[str, tuple[str, int, list[str], int]] = {
    "cpu": ("lenet", 64, ["--cpu"], 1),
    "gpu": ("lenet", 64, ["--gpus", "0"], 1),
    "gpus": ("lenet", 64, ["--gpus", "0,1"], 1),
    "ranks": ("lenet", 64, [], 2),
    "resnet50": ("resnet50", 128, ["--gpus", "0"], 1),
    "googlenet": ("googlenet", 128, ["--gpus", "0"], 1),
}
"""For each row the model, its batch, the devices and the ranks."""


@dataclass
class Run:
    """What one start took.

    Args:
        wall: seconds until the command's end, of which training needs a few hundredths.
        first: seconds until the first iteration's end.
        silence: the longest time between two lines until then.
        phases: for each phase its number and seconds, in the order of their ends.
        text: the log.
    """

    wall: float = 0.0
    first: float | None = None
    silence: float = 0.0
    phases: dict[str, tuple[int, float]] = field(default_factory=dict)
    text: str = ""


def write_solver(folder: Path, model: str, batch: int) -> Path:
    """A solver of a model, with the digits that come with caffepy or with made-up images."""
    from google.protobuf import text_format

    from caffepy.config.load import read_net

    lenet = model == "lenet"
    net = read_net(ROOT / "models" / model / ("train_test.prototxt" if lenet else "train_val.prototxt"))
    if not lenet:
        layers = [layer for layer in net.layer if layer.type != "Data"]
        del net.layer[:]
        source = net.layer.add(name="data", type="DummyData", top=["data", "label"])
        source.dummy_data_param.shape.add(dim=(batch, 3, 224, 224))
        source.dummy_data_param.shape.add(dim=(batch,))
        net.layer.extend(layers)
        text = "default_forward_type: FLOAT16 default_backward_type: FLOAT16"
        text_format.Merge(text, net)
    (folder / "net.prototxt").write_text(text_format.MessageToString(net))
    solver = folder / "solver.prototxt"
    solver.write_text(
        'net: "net.prototxt"\nbase_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 20 display: 10 random_seed: 1\n'
        "snapshot_after_train: false\n"
    )
    return solver


def read_run(command: list[str], environment: dict[str, str], folder: Path, limit: float) -> Run:
    """Run a command and take its log apart."""
    run, begin = Run(), time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    last, lines = begin, []
    with process:
        for line in process.stderr:
            now = time.monotonic()
            if run.first is None:
                run.silence = max(run.silence, now - last)
            last = now
            lines.append(line)
            if phase := _PHASE.search(line):
                run.phases[phase[1]] = (int(phase[2]), float(phase[3]))
            if (end := _END.search(line)) and run.first is None:
                run.first = float(end[1])
            if now - begin > limit:
                process.kill()
    run.wall = time.monotonic() - begin
    run.text = "".join(lines)
    return run


def measure(row: str, folder: Path, limit: float) -> list[Run]:
    """The two starts of a row: with empty caches and with full ones."""
    model, batch, devices, ranks = ROWS[row]
    solver = write_solver(folder, model, batch)
    caches = {name: str(folder / "caches" / name) for name in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **caches, "PYTHONPATH": path}
    command = [sys.executable, "-m", "caffepy", "train", "--solver", str(solver), *devices, "--profile-start"]
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "-np", str(ranks), *command]
    if model == "lenet":
        data = [sys.executable, "-m", "caffepy", "data", "mnist", "--subset", "--to", str(folder)]
        subprocess.run(data, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    shutil.rmtree(folder / "caches", ignore_errors=True)
    runs = [read_run(command, environment, folder, limit) for _ in range(2)]
    for number, run in enumerate(runs):
        (folder / f"{row}-{number}.log").write_text(run.text)
    return runs


def show(row: str, runs: list[Run]) -> None:
    """Print a row's table."""
    first = " | ".join("failed" if run.first is None else f"{run.first:.2f} s" for run in runs)
    print(f"\n| {row}: {ROWS[row][0]} {' '.join(ROWS[row][2])} | empty caches | full caches |\n|---|---|---|")
    print(f"| first iteration ended | {first} |")
    print(f"| whole command, 20 iterations | {' | '.join(f'{run.wall:.2f} s' for run in runs)} |")
    print(f"| longest silence | {' | '.join(f'{run.silence:.2f} s' for run in runs)} |")
    for name in dict.fromkeys(name for run in runs for name in run.phases):
        cells = (f"{run.phases[name][0]}, {run.phases[name][1]:.2f} s" if name in run.phases else "" for run in runs)
        print(f"| {name} | {' | '.join(cells)} |")
    for run in runs:
        if run.first is None:
            print(run.text[-2000:], file=sys.stderr)
    sys.stdout.flush()


def main() -> None:
    """Measure the rows that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="longest time of a command (120)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs and caches stay")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        for row in arguments.rows.split(","):
            folder = (arguments.keep or Path(temporary)) / row
            folder.mkdir(parents=True, exist_ok=True)
            show(row, measure(row, folder, arguments.limit))


if __name__ == "__main__":
    main()
