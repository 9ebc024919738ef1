"""Scripts written for torch.distributed run with another import: spawn, multiprocessing, launch and mpirun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import spawned
from group_faults import Ended, environment, run
from process_groups import free_port
from processes import find_mpirun

from caffepy.distributed import spawn

TUTORIAL = """
import os
import numpy as np
import torch.distributed as dist
import multiprocessing as mp

def run(rank, size):
    tensor = np.zeros(1)
    if rank == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    else:
        req = dist.irecv(tensor=tensor, src=0)
    req.wait()
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    open(f"{rank}.txt", "w").write(f"{tensor[0]} {dist.get_backend()}")

def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "FREE_PORT"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)

if __name__ == "__main__":
    size = 2
    processes = []
    mp.set_start_method("spawn")
    for rank in range(size):
        p = mp.Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0, 0]
"""
LAUNCHED = """
import argparse, os
import numpy as np
import torch.distributed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
torch.distributed.init_process_group(backend="GLOO", init_method="env://")
x = np.full(2, torch.distributed.get_rank() + 1.0)
torch.distributed.all_reduce(x)
local = f"{args.local_rank} {os.environ['LOCAL_RANK']}"
os.write(1, f"rank {torch.distributed.get_rank()}: {local} {args.lr} {x}\\n".encode())
"""
UNDER_MPI = """
import os
import numpy as np
import torch.distributed as dist
dist.init_process_group("mpi", rank=0, world_size=0)
x = np.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="env://")
dist.all_reduce(x)
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}: {x}\\n".encode())
raise ValueError("injected")
"""


def write(folder: Path, script: str) -> str:
    """A script with its import changed."""
    path = folder / "script.py"
    text = script.replace("import torch.distributed as dist", "import caffepy.distributed as dist")
    path.write_text(text.replace("torch.distributed", "caffepy.distributed"))
    return str(path)


def test_files_addresses_and_groups(tmp_path: Path) -> None:
    methods = (f"file://{tmp_path}/shared", f"tcp://127.0.0.1:{free_port()}", None)
    context = spawn(spawned.meet, args=(3, methods, str(tmp_path)), nprocs=3, join=False)
    assert context is not None and [process.is_alive() for process in context.processes] == [True] * 3
    assert not context.join(timeout=0.0)
    assert context.join() and context.join()
    for rank in range(3):
        assert (tmp_path / f"{rank}.txt").read_text() == "done"


def test_the_tutorial_with_processes_of_its_own(tmp_path: Path) -> None:
    script = write(tmp_path, TUTORIAL.replace("FREE_PORT", str(free_port())))
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment(), timeout=300, text=True, stderr=-1)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2.0 tcp"] * 2


def assert_launched(ended: Ended, ranks: dict[int, int]) -> None:
    assert set(ended.statuses) == {0}, ended.log
    total = float(sum(rank + 1 for rank in ranks))
    lines = [f"rank {rank}: {local} {local} 0.1 [{total:.0f}. {total:.0f}.]" for rank, local in ranks.items()]
    assert sorted(re.findall(r"(?m)^rank .*$", ended.log)) == lines, ended.log


def test_two_nodes_on_one_machine(tmp_path: Path) -> None:
    script, port = write(tmp_path, LAUNCHED), str(free_port())
    words = ["--nproc_per_node=2", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    nodes = [
        [sys.executable, "-m", "caffepy", "launch", *words, f"--node_rank={node}", script, "--lr", "0.1"]
        for node in range(2)
    ]
    assert_launched(run([(node, environment()) for node in nodes], tmp_path), {0: 0, 1: 1, 2: 0, 3: 1})


@pytest.mark.mpi
def test_an_error_under_mpirun_is_printed_once(tmp_path: Path) -> None:
    command = [find_mpirun(), "-np", "3", sys.executable, write(tmp_path, UNDER_MPI)]
    ended = run([(command, environment())], tmp_path)
    assert ended.statuses[0] != 0
    assert sorted(re.findall(r"rank \d of 3: \[9\.\]", ended.log)) == [f"rank {rank} of 3: [9.]" for rank in range(3)]
    assert ended.log.count("Traceback") == 1, ended.log
    assert len(re.findall(r"(?m)^ValueError: injected$", ended.log)) == 1, ended.log
    assert len(re.findall(r"(?m)^rank \d on .*: ValueError: injected$", ended.log)) == 2, ended.log
