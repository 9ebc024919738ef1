"""Real processes of one host that name GPUs, which are simulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import program_environment
from subprocess_training import RANKS, find_mpirun

SUPPORT = Path(__file__).parents[1] / "support"
DEVICES = """
import os, sys, simulated_nccl
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ.get("RANK"))
shown = sys.argv[2:]
if shown:
    os.environ["CUDA_VISIBLE_DEVICES"] = shown[rank]
simulated_nccl.install(gpus=4)
from caffepy.training.consistency import agree_on_options
from caffepy.training.options import TrainOptions
from caffepy.distributed.processes.world import create_world
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.training.devices import check_gpus

world = create_world()
named = check_gpus("all" if sys.argv[1] == "all" else list(map(int, sys.argv[1].split(","))))
found = world.all_gather(agree_on_options(world, TrainOptions(SolverParameter(), devices=named)).devices)
if world.rank == 0:
    print("devices", found, flush=True)
world.close()
"""
TRAIN = """
import sys, simulated_nccl
simulated_nccl.install(gpus=1)
from caffepy.cli.main import main
sys.exit(main(["train", "--solver", sys.argv[1], "--gpus", "0"]))
"""


def start(way: str, ranks: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as several ranks, with MPI or without."""
    launcher = [find_mpirun(), "-n"] if way == "mpirun" else [sys.executable, str(RANKS)]
    environment = program_environment({})
    environment["PYTHONPATH"] = os.pathsep.join((str(SUPPORT), environment["PYTHONPATH"]))
    line = [*launcher, str(ranks), sys.executable, "-c", code, *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["mpirun", "torchrun's variables"])
@pytest.mark.parametrize(
    ("ranks", "arguments", "devices"),
    [
        (2, ["0,1,2,3"], [[0, 1], [2, 3]]),
        (2, ["all"], [[0, 1], [2, 3]]),
        (2, ["0", "2", "3"], [[0], [0]]),  # as Slurm deals GPUs out
        (2, ["0,1", "0,1", "2,3"], [[0, 1], [0, 1]]),
    ],
)
def test_ranks_of_one_host_divide_their_list(
    way: str, ranks: int, arguments: list[str], devices: list[list[int]]
) -> None:
    done = start(way, ranks, DEVICES, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"devices {devices}" in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["mpirun", "torchrun's variables"])
def test_two_ranks_on_a_machine_with_one_gpu(way: str, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text('layer { name: "d" type: "DummyData" top: "d" }')
    solver = tmp_path / "solver.prototxt"
    solver.write_text(f'net: "{tmp_path}/net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1')
    done = start(way, 2, TRAIN, str(solver))
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "caffepy: error:" in line]
    assert len(errors) == 1 and "has 2 ranks (0,1) for 1 GPU (0): 1 rank fits; start as many" in errors[0], done.stderr
