"""Functions that the tests start in processes of their own; a process finds them by importing this module."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

import caffepy
from caffepy import distributed
from caffepy.errors import UserError
from caffepy.utils.options import ExecutionOptions


def train(rank: int, folder: str, batch: int, on_gpu: bool = False, eager: bool = False) -> None:
    """Train the folder's solver with the others; each rank writes its weights."""
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    assert rank == distributed.get_rank()
    param = caffepy.read_solver(Path(folder) / f"solver{batch}.prototxt")
    backend = caffepy.create_backend(rank if on_gpu else None, 1, "fp32")
    with backend.activate():
        solver = caffepy.create_solver(param, backend, engine=ExecutionOptions(eager))
        distributed.DistributedDataParallel(
            solver, device_ids=[rank] if on_gpu else None, output_device=rank if on_gpu else None
        )
        solver.solve()
        found = [blob.host_data() for layer in solver.net.layers for blob in layer.blobs]
    np.savez(Path(folder) / f"rank{rank}.npz", *found)


def meet(rank: int, size: int, methods: tuple[str | None, ...], folder: str) -> None:
    """Meet in each way; in groups of some ranks, `src` and `dst` are ranks of all, and others do nothing."""
    for method in methods:
        if method is None:
            distributed.init_process_group(timeout=timedelta(seconds=300))
        else:
            distributed.init_process_group(init_method=method, rank=rank, world_size=size)
        total = np.full(1, rank + 1.0)
        distributed.all_reduce(total, op=distributed.ReduceOp.SUM)
        assert total == 6.0 and distributed.get_rank(distributed.group.WORLD) == rank
        if method is not None:
            distributed.destroy_process_group()
    pair, own = distributed.new_group(ranks=[1, 2]), np.full(1, rank)
    distributed.broadcast(own, src=2, group=pair)
    assert own == (0, 2, 2)[rank]
    if rank != 0:
        distributed.reduce(own, dst=1, group=pair)
        assert own == (0, 4, 2)[rank]
        if rank == 1:
            distributed.send(own, dst=2, group=pair)
        else:
            assert distributed.recv(own, src=1, group=pair) == 1 and own == 4
            try:
                distributed.send(own, dst=0, group=pair)
            except UserError as error:
                assert "dst 0 is not a rank of this group: ranks are 1, 2" in str(error)
    Path(f"{folder}/{rank}.txt").write_text("done")


def fail(rank: int, how: str) -> None:
    """Rank 1 falls out, all others wait for it."""
    distributed.init_process_group()
    if rank == 1:
        if how == "raise":
            raise ValueError("injected")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    try:
        distributed.barrier()
    finally:
        if how == "raise":
            time.sleep(600)  # spawn ends who goes on
