"""`--check`: one iteration and a short test with all that training needs, and then the end, with no snapshot."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.formats.snapshot_files import snapshot_paths
from caffepy.net.memory_plan import GIBIBYTE, MEBIBYTE

if TYPE_CHECKING:
    from caffepy.training.solver import Solver

_NEVER = 2**31 - 1
"""An interval that no training reaches."""


def shortened(param: SolverParameter, devices: int) -> SolverParameter:
    """Return a solver that does not test or write snapshots by itself, with one test batch for each device.

    Args:
        param: the solver; not changed.
        devices: that train together.
    """
    short = SolverParameter()
    short.CopyFrom(param)
    short.test_iter[:] = [min(batches, devices) for batches in param.test_iter]
    short.test_initialization = False
    short.ClearField("test_and_snapshot_last_epochs")
    for name in ("test_interval", "snapshot"):
        if getattr(param, name):
            setattr(short, name, _NEVER)
    return short


def check_training(solver: Solver) -> None:
    """Make one iteration and score a batch of each test net; every device must call it.

    The constructor of a solver of `shortened` has built the nets and checked that snapshots can be written.

    Raises:
        CaffepyError: an error that would end training in its first iteration or test.
    """
    solver.step(1, progress=False)
    loss = solver.losses.values()
    solver.log("Check: one iteration was made%s", f", loss = {loss[-1]:.6g}" if loss else "")
    if solver.test_nets:
        scores = solver.test_all()
        names = ", ".join(f"{name} = {np.mean(value):.6g}" for net in scores for name, value in net.items())
        solver.log("Check: the test nets score %s", names)
    if (free := solver.backend.available_memory()) is not None:
        solver.log(
            "Check: %.1f GiB of memory on %s are free beside this training", free / GIBIBYTE, solver.backend.name
        )
    if solver.snapshots.wanted and solver.callback.is_root:
        _check_space(solver)
    solver.log("Check: training can begin; nothing was written")
    solver.stopped_early = True


def _check_space(solver: Solver) -> None:
    path = snapshot_paths(solver.param, solver.resolve, solver.param.max_iter)[1]
    size = 4 * solver.net.parameters.size * (1 + len(solver.history))
    free = shutil.disk_usage(path.parent).free
    solver.log(
        "Check: snapshots can be written to %s: %.1f MiB each, %.1f GiB are free",
        path.parent,
        size / MEBIBYTE,
        free / GIBIBYTE,
    )
