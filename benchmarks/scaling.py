"""Data-parallel training: images/s on one device, on several in one process, and on as many ranks of mpirun.

    python benchmarks/scaling.py --gpus 0,1 [--nets lenet,resnet50] [--iterations 60] [--math fp32] [--type FLOAT16]
    python benchmarks/scaling.py --gpus 0,1 --nets resnet50 --type FLOAT16 --batch 256 --peer
    python benchmarks/scaling.py --cpu 2

Each line is one run of `caffepy train` as a user would type it, on synthetic images, with as many for each device
whatever their number (weak scaling); the figure is that of the performance report, which leaves out the first two
iterations. Efficiency is against as many times one device. On GPUs one process is also started by `mpirun -np 1`, whose
default binding leaves it one core. `--peer` adds PyTorch's DistributedDataParallel with ResNet-50, `torch_parallel.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
from google.protobuf import text_format
from zoo_nets import net_param, values

from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter, Type
from caffepy.utils.installation import install_command

ROOT = Path(__file__).resolve().parent.parent
NETS = {"lenet": 64, "cifar10_quick": 100, "caffenet": 128, "googlenet": 64, "resnet50": 64}
"""For each net of zoo_nets.py one device's batch of images; `--batch` lets others be named."""
LIMIT = 240
"""Seconds that one run may take."""


def synthetic_net(folder: Path, name: str, batch: int, kind: str) -> NetParameter:
    """The training net with made-up images and labels in place of its data layers."""
    net, made = net_param(name, True, batch, "DummyData")
    for index, (blob, each) in enumerate(made.items()):
        source = net.layer.add(name=blob, type="DummyData", top=[blob])
        if each[1] == "boxes":  # SSD's, which no filler makes
            path = folder / f"{name}_{blob}.h5"
            with h5py.File(path, "w") as file:
                file[blob] = values(each, 1)
            (folder / f"{name}_{blob}.txt").write_text(f"{path}\n")
            source.type = "HDF5Data"
            source.hdf5_data_param.source, source.hdf5_data_param.batch_size = str(path.with_suffix(".txt")), 1
        else:
            source.dummy_data_param.shape.add(dim=each[0])
            source.dummy_data_param.data_filler.add(type="constant", value=0.5 if index == 0 else 1)
    layers = [*net.layer[-len(made) :], *net.layer[1 : -len(made)]]
    del net.layer[:]
    net.layer.extend(layers)
    net.default_forward_type = net.default_backward_type = Type.Value(kind)
    return net


def write_solver(folder: Path, name: str, iterations: int, kind: str, batch: int) -> Path:
    """A solver of a synthetic net; returns its path."""
    param = SolverParameter(
        net_param=synthetic_net(folder, name, batch or NETS[name], kind),
        base_lr=1e-5,
        lr_policy="fixed",
        momentum=0.9,
        weight_decay=0.0005,
        max_iter=iterations,
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
    )
    path = folder / f"{name}_solver.prototxt"
    path.write_text(text_format.MessageToString(param))
    return path


def mpirun() -> list[str]:
    """The launcher beside this Python, or the one on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise SystemExit(f"no mpirun found: {install_command('mpi')}")
    return [found, "--oversubscribe"]


def images_per_second(command: list[str], folder: Path) -> float:
    """Run one training; its overall images/s."""
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    figures = re.findall(r"performance.*?([\d.]+) img/sec", result.stderr)
    if result.returncode or not figures:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return float(figures[-1])


def measure(name: str, devices: list[str] | int, arguments: argparse.Namespace, folder: Path) -> None:
    """Print one net's lines."""
    solver = write_solver(folder, name, arguments.iterations, arguments.type, arguments.batch)
    program = [sys.executable, "-m", "caffepy", "train", "--math", arguments.math, "--solver", str(solver)]
    if isinstance(devices, int):
        count = devices
        threads = max((os.cpu_count() or count) // count, 1)
        one = [*program, "--cpu", "--threads", str(threads)]
        several = [*program, "--cpu", "--cpu-solvers", str(count), "--threads", str(threads)]
        ranks = [*mpirun(), "-np", str(count), *one]
    else:
        count = len(devices)
        one = [*program, "--gpus", devices[0]]
        several = [*program, "--gpus", ",".join(devices)]
        ranks = mpirun()
        for device in devices:
            ranks += ["-np", "1", *program, "--gpus", device, ":"]
        ranks.pop()
        bound = [*mpirun(), "-np", "1", *several]
    alone = images_per_second(one, folder)
    print(f"{name:14} 1 device                {alone:12.1f} images/s")
    kinds = [(f"{count} devices, 1 process", several), (f"{count} ranks of 1 device", ranks)]
    if not isinstance(devices, int):
        kinds.append((f"{count} devices, mpirun -np 1", bound))
    for label, command in kinds:
        rate = images_per_second(command, folder)
        print(f"{name:14} {label:24}{rate:12.1f} images/s   efficiency {rate / alone / count:.3f}", flush=True)


def measure_peer(devices: list[str] | int, kind: str, batch: int) -> None:
    """Print PyTorch's lines, on one device and on all."""
    count = devices if isinstance(devices, int) else len(devices)
    names = "" if isinstance(devices, int) else ",".join(devices)
    alone = 0.0
    for number in (1, count):
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        program += [str(ROOT / "benchmarks" / "torch_parallel.py"), "train", "--type", kind, "--batch", str(batch)]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": names} if names else {})
        result = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=LIMIT)
        figures = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        if result.returncode or not figures:
            raise SystemExit(f"{' '.join(program)} failed:\n{result.stderr[-3000:]}")
        rate = figures[-1]["images_per_second"]
        alone = alone or rate
        label, efficiency = f"{number} devices, DDP", rate / alone / number
        print(f"{'PyTorch':14} {label:24}{rate:12.1f} images/s   efficiency {efficiency:.3f}", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", help="GPU numbers, separated by commas")
    parser.add_argument("--cpu", type=int, help="number of CPU solvers")
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--math", choices=("fp32", "tf32"), default="tf32")
    parser.add_argument("--type", choices=("FLOAT", "FLOAT16", "BFLOAT16"), default="FLOAT", help="dtype of blobs")
    parser.add_argument("--batch", type=int, default=0, help="images of a device, in place of the net's own")
    parser.add_argument("--peer", action="store_true", help="PyTorch's ResNet-50 as well")
    arguments = parser.parse_args()
    devices = arguments.gpus.split(",") if arguments.gpus else arguments.cpu or 2
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.nets.split(","):
            measure(name, devices, arguments, Path(folder))
    if arguments.peer:
        measure_peer(devices, arguments.type, arguments.batch or NETS["resnet50"])


if __name__ == "__main__":
    main()
