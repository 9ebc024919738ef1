"""How long `caffepy train` takes from the command to the end of its first iteration.

    python benchmarks/start.py [--rows cpu,gpu,...] [--starts 3] [--package FOLDER] [--torch PYTHON]

Rows: LeNet, MobileNet, ResNet-50 and SSD300 on the CPU; LeNet on one GPU, on two GPUs of one process and of two ranks
under mpirun; ResNet-50, GoogLeNet, EfficientNet-B0, ShuffleNet and U-Net in FLOAT16 on one GPU. Each starts with empty
caches of its own (XDG_CACHE_HOME, CUPY_CACHE_DIR, CUDA_CACHE_PATH), then with those that the start before has filled,
in turn; figures are medians of `--starts`. The first iteration has ended when the log shows the loss of the second.
`silence` is the longest time between two lines of the log before that.
`--package` measures the caffepy in another folder, for comparisons. `--torch` adds PyTorch on one GPU: from a net that
is built to the end of its first iteration under `torch.compile`, without its imports.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from start_nets import NETS

ROOT = Path(__file__).resolve().parents[1]
HALF = "\ndefault_forward_type: FLOAT16 default_backward_type: FLOAT16\n"
_END = re.compile(r"\] Iteration 1[ ,]")

ROWS: dict[str, tuple[str, int, list[str], int]] = {
    "cpu": ("lenet", 64, ["--cpu"], 1),
    "cpu-mobilenet": ("mobilenet", 2, ["--cpu"], 1),
    "cpu-resnet50": ("resnet50", 1, ["--cpu"], 1),
    "cpu-ssd300": ("ssd300", 1, ["--cpu"], 1),
    "gpu": ("lenet", 64, ["--gpus", "0"], 1),
    "gpus": ("lenet", 64, ["--gpus", "0,1"], 1),
    "ranks": ("lenet", 64, [], 2),
    "resnet50": ("resnet50", 128, ["--gpus", "0"], 1),
    "googlenet": ("googlenet", 128, ["--gpus", "0"], 1),
    "efficientnet": ("efficientnet_b0", 64, ["--gpus", "0"], 1),
    "shufflenet": ("shufflenet", 128, ["--gpus", "0"], 1),
    "unet": ("unet", 16, ["--gpus", "0"], 1),
}
"""For each row the model, its batch, the devices and the ranks."""


@dataclass
class Run:
    """What one start took.

    Args:
        wall: seconds until the command's end, of which training needs a few hundredths.
        first: seconds until the first iteration's end.
        silence: the longest time between two lines until then.
        text: the log.
    """

    wall: float = 0.0
    first: float | None = None
    silence: float = 0.0
    text: str = ""


def write_solver(folder: Path, model: str, batch: int, types: str) -> Path:
    """A solver of a model whose blobs have the given types, with the digits of caffepy or with made-up images."""
    from google.protobuf import text_format

    from caffepy.formats.load import read_net

    lenet = model == "lenet"
    if model in NETS:
        (folder / "net.prototxt").write_text(NETS[model](batch) + types)
        return _write_solver(folder)
    net = read_net(ROOT / "models" / model / ("train_test.prototxt" if lenet else "train_val.prototxt"))
    if not lenet:
        layers = [layer for layer in net.layer if layer.type not in ("Data", "AnnotatedData")]
        del net.layer[:]
        source = net.layer.add(name="data", type="DummyData", top=["data", "label"])
        boxes = model == "ssd300"
        side = 300 if boxes else 224
        source.dummy_data_param.shape.add(dim=(batch, 3, side, side))
        source.dummy_data_param.shape.add(dim=(1, 1, 1, 8) if boxes else (batch,))
        net.layer.extend(layers)
        text_format.Merge(types, net)
    (folder / "net.prototxt").write_text(text_format.MessageToString(net))
    return _write_solver(folder)


def _write_solver(folder: Path) -> Path:
    solver = folder / "solver.prototxt"
    solver.write_text(
        'net: "net.prototxt"\nbase_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 3 display: 1 random_seed: 1\n'
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
            if run.first is None and _END.search(line):
                run.first = now - begin
            if now - begin > limit:
                process.kill()
    run.wall = time.monotonic() - begin
    run.text = "".join(lines)
    return run


def measure(row: str, folder: Path, package: Path, starts: int, limit: float) -> tuple[list[Run], list[Run]]:
    """The starts of a row: with empty caches and with full ones."""
    model, batch, devices, ranks = ROWS[row]
    solver = write_solver(folder, model, batch, "" if "--cpu" in devices else HALF)
    caches = {name: str(folder / "caches" / name) for name in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")}
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **caches, "PYTHONPATH": path}
    command = [sys.executable, "-m", "caffepy", "train", "--solver", str(solver), *devices]
    if ranks > 1:
        command = ["mpirun", "--oversubscribe", "-np", str(ranks), *command]
    if model == "lenet":
        data = [sys.executable, "-m", "caffepy", "data", "mnist", "--subset", "--to", str(folder)]
        subprocess.run(data, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    empty, full = [], []
    for number in range(starts):
        shutil.rmtree(folder / "caches", ignore_errors=True)
        for kind, runs in (("empty", empty), ("full", full)):
            runs.append(read_run(command, environment, folder, limit))
            (folder / f"{row}-{kind}-{number}.log").write_text(runs[-1].text)
    return empty, full


def torch_start(row: str, folder: Path, python: str) -> list[str]:
    """PyTorch's seconds to the first compiled iteration, with empty caches and with full ones."""
    from peers.description import describe
    from processes import in_a_process
    from zoo import TORCH

    model, batch, _, _ = ROWS[row]
    description = describe(model if model == "lenet" else str(folder / "net.prototxt"), True, batch)
    dtype = "FLOAT" if model == "lenet" else "FLOAT16"
    job = {"description": description, "mode": "compile", "device": "gpu", "dtype": dtype, "quick": True}
    os.environ |= {name: str(folder / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found = [in_a_process([python, str(TORCH)], job, other_python=True) for _ in range(2)]
    return [one if isinstance(one, str) else f"{one['first']:.2f} s" for one in found]


def show(row: str, runs: tuple[list[Run], list[Run]], peer: list[str]) -> None:
    """Print a row's table."""
    print(f"\n| {row}: {ROWS[row][0]} {' '.join(ROWS[row][2])} | empty caches | full caches |\n|---|---|---|")
    print(f"| first iteration ended | {' | '.join(_first(starts) for starts in runs)} |")
    print(f"| whole command, 3 iterations | {' | '.join(_median(run.wall for run in starts) for starts in runs)} |")
    if peer:
        print(f"| PyTorch's first compiled iteration, after imports | {' | '.join(peer)} |")
    print(f"| longest silence | {' | '.join(_median(run.silence for run in starts) for starts in runs)} |")
    for run in (*runs[0], *runs[1]):
        if run.first is None:
            print(run.text[-2000:], file=sys.stderr)
    sys.stdout.flush()


def _first(starts: list[Run]) -> str:
    found = [run.first for run in starts if run.first is not None]
    return f"{_median(found)}, {min(found):.2f} to {max(found):.2f}" if len(found) == len(starts) else "failed"


def _median(seconds: Iterable[float]) -> str:
    return f"{median(seconds):.2f} s"


def main() -> None:
    """Measure the rows that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="of each kind (3)")
    parser.add_argument("--package", type=Path, default=ROOT, metavar="FOLDER", help="what is measured (this one)")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with PyTorch")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="longest time of a command (120)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs and caches stay")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        for row in arguments.rows.split(","):
            folder = (arguments.keep or Path(temporary)) / row
            folder.mkdir(parents=True, exist_ok=True)
            package = arguments.package.resolve()
            runs = measure(row, folder, package, arguments.starts, arguments.limit)
            one_gpu = ROWS[row][2] == ["--gpus", "0"]
            show(row, runs, torch_start(row, folder, arguments.torch) if arguments.torch and one_gpu else [])


if __name__ == "__main__":
    main()
