"""The NCCL backend over simulated NCCL: real NCCL is tested by tests/gpu/test_distributed_gpu.py."""

from __future__ import annotations

import re

import pytest
from simulated_nccl import run_simulated

BEGIN = """
import numpy as np, simulated_nccl
simulated_nccl.install(gpus=%d)
from collectives import Checker
from process_groups import run_threads, free_port
from caffepy.distributed.default import connect
method = f"tcp://127.0.0.1:{free_port()}"
def group(rank, size, device=None):
    return connect("nccl", method, rank=rank, world_size=size, timeout=300, device_id=device)
"""


def run(code: str, gpus: int = 3) -> list[str]:
    """The lines that a script prints, in a process whose CuPy is simulated."""
    return run_simulated(BEGIN % gpus + code)


@pytest.mark.parametrize("size", [1, 3])
def test_every_operation_against_numpy(size: int) -> None:
    code = f"""
def work(rank):
    with group(rank, {size}) as g:
        assert g.communicator.memory == "gpu" and simulated_nccl.here.device == rank
        return Checker(g, simulated_nccl.array, np.asarray).everything()
print(*run_threads({size}, work), sep="\\n")
"""
    assert [int(checks) > 400 for checks in run(code)] == [True] * size


def test_what_nccl_does_not_take() -> None:
    code = """
def work(rank):
    errors = []
    with group(rank, 2) as g:
        for call in (lambda: g.all_reduce(np.zeros(3)), lambda: g.send(simulated_nccl.array([1.0]), 1 - rank, tag=3)):
            try:
                call()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    return "\\n".join(errors)
print(*run_threads(2, work), sep="\\n")
"""
    lines = run(code)
    assert len(lines) == 4
    assert sum("all_reduce: tensor is in host memory" in line for line in lines) == 2
    assert sum("send: NCCL does not support tags: leave it out" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("gpus", "device", "message"),
    [
        (2, "None", "this host has 2 GPUs for 3 ranks: start fewer ranks, or give each its device_id="),
        (3, "1", "both use the GPU at 0000:01:00.0: give each its device_id="),
        (1, "None", "both use the GPU at 0000:00:00.0"),
    ],
)
def test_ranks_without_a_gpu_of_their_own(gpus: int, device: str, message: str) -> None:
    code = f"print(*run_threads(3, lambda rank: group(rank, 3, {device})), sep='\\n')"
    lines = run(code, gpus)
    assert len(lines) == 3 and all(message in line for line in lines), lines


def test_an_error_of_one_rank_ends_the_others_waits() -> None:
    code = """
def work(rank):
    with group(rank, 3) as g:
        g.barrier()
        if rank == 1:
            raise ValueError("injected")
        g.all_reduce(simulated_nccl.array(np.zeros(4)))
print(*run_threads(3, work), sep="\\n")
"""
    first, second, third = run(code)
    assert second == "injected"
    for rank, line in ((0, first), (2, third)):
        # Who was still in the barrier when rank 1 fell out, hears of it there.
        found = re.match(rf"rank {rank} on .*: (barrier|all_reduce SUM of 4 float64): rank 1 on ", line)
        assert found, line
        assert line.endswith("ValueError: injected")
