"""MPI's communicator, and that of threads of several processes over it: one mpirun for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import find_mpirun
from subprocess_training import program_environment

pytestmark = pytest.mark.mpi

PROGRAM = """
from contextlib import nullcontext
import numpy as np
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.processes.world import create_world

world = create_world()
communicators = {
    "mpi": world.communicator(),
    **{
        f"{kind} {inter_node}": HierarchicalCommunicator(
            LocalCommunicator(ThreadGroup(1), 0), world.communicator(), kind, inter_node
        )
        for kind in ("none", "fp16", "bf16")
        for inter_node in (True, False)
    },
}

def full(dtype=np.float32):
    return np.full(5, 1.0 + 2.5 * world.rank, dtype)

for name, communicator in communicators.items():
    mean, total, second = full(), full(), full()
    communicator.all_reduce(mean)
    communicator.all_reduce(total, average=False)
    communicator.broadcast(second, root=1)
    communicator.barrier()
    assert (mean == 2.25).all() and (total == 4.5).all() and (second == 3.5).all(), (name, mean, total, second)
    assert communicator.sum([[1.0, world.rank]]).tolist() == [[2.0, 1.0]], name
    assert communicator.completed is None and not communicator.capturable, name
    if communicator.asynchronous:
        arrays = [full(), 2 * full()]
        works = [communicator.all_reduce_async(array, nullcontext()) for array in arrays]
        for work in works:
            work.poll()
        assert all(work.synchronize() for work in works), name
        assert (arrays[0] == 2.25).all() and (arrays[1] == 4.5).all(), (name, arrays)
    communicator.close()
world.close()
print("done", flush=True)
"""


def test_helpers_and_overlapped_averages_are_numpys_sums_and_means() -> None:
    command = [find_mpirun(), "-np", "2", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=program_environment({}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "done"]
