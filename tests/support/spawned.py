"""Functions that the tests start in processes of their own; a process finds them by importing this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

import caffepy
from caffepy import distributed
from caffepy.options import ExecutionOptions


def train(folder: str, batch: int, on_gpu: bool = False, eager: bool = False) -> None:
    """Train the folder's solver with the others; each rank writes its weights."""
    param = caffepy.read_solver(Path(folder) / f"solver{batch}.prototxt")
    backend = caffepy.create_backend(distributed.get_rank() if on_gpu else None, 1, "fp32")
    with backend.activate():
        solver = caffepy.create_solver(param, backend, engine=ExecutionOptions(eager))
        distributed.DataParallel(solver)
        solver.solve()
        found = [blob.host_data() for layer in solver.net.layers for blob in layer.blobs]
    np.savez(Path(folder) / f"rank{distributed.get_rank()}.npz", *found)


def fail(how: str) -> None:
    """Rank 1 falls out, all others wait for it."""
    if distributed.get_rank() == 1:
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
