"""Training with a process a device (pycaffe's `NCCL`; Caffe's `parallel.cpp`), as Caffe's `python/train.py` does it.

The processes meet at a file that the uid names, so they share a machine. On GPUs NCCL carries the arrays, on CPUs TCP.
Training on several machines is `caffepy train` under mpirun.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from caffepy.distributed.data_parallel import gradient_communicator
from caffepy.distributed.default import connect
from caffepy.errors import UserError
from caffepy.net.parameters import bucket_count
from caffepy.parallel.reducer import Reducer
from caffepy.pycaffe.mode import mode
from caffepy.pycaffe.solver import Solver
from caffepy.trace import NO_TRACE

_PREFIX = "caffepy-nccl-"


def has_nccl() -> bool:
    """Whether `NCCL` can be used: it always can, because on CPUs it needs no NCCL."""
    return True


class NCCL:
    """One process's end of a group of solvers that train together; all make theirs at about the same time.

    The group's size is `set_solver_count`'s, this process's number in it `set_solver_rank`'s.

    Args:
        solver: whose parameters and gradients are exchanged.
        uid: from `new_uid`, called once, by the program that starts the processes.

    Raises:
        UserError: the uid is none, or this rank's number is too large.
        PeerError: the other processes have not come in time, or one of them has failed.
        MissingExtraError: `set_mode_gpu` was called, and NCCL or CuPy is not installed.
    """

    def __init__(self, solver: Solver, uid: bytes) -> None:
        net = solver.net.net
        self._parameters = net.parameters
        self._device = solver.device
        self._group = connect(
            "nccl" if mode.gpu else "tcp",
            _address(uid),
            rank=mode.solver_rank,
            world_size=mode.solver_count,
            device=mode.device if mode.gpu else None,
        )
        in_parts = solver.param.layer_wise_reduce and solver.param.iter_size == 1 and not net.backend.asynchronous
        buckets = bucket_count(net.param) if in_parts else 1
        self._communicator = gradient_communicator(self._group)
        self._called = False
        """Whether `run` was handed to the net: gradients may be exchanged while the backward pass goes on."""
        waiting = self._group.bounded
        with self._device.active():
            self._reducer = Reducer(net, self._communicator, buckets, lambda: self._called, waiting, NO_TRACE)
        # Children of multiprocessing end without the handlers of atexit.
        Finalize(self, self._group.destroy, exitpriority=10)

    @staticmethod
    def new_uid() -> bytes:
        """What tells a group of processes from others; one that starts them hands it to all."""
        return os.fsencode(Path(tempfile.gettempdir()).absolute() / f"{_PREFIX}{secrets.token_hex(16)}")

    def bcast(self) -> None:
        """Give all processes the parameters of rank 0.

        Raises:
            PeerError: another process failed, left or did not come.
        """
        with self._device.computing(), self._group.bounded("the root's weights"):
            self._communicator.broadcast(self._parameters.data, root=0)
            self._communicator.wait_on_device()
            self._parameters.written()

    def on_gradients_ready(self) -> None:
        """Make the gradients the average over all processes; for `solver.add_callback(nccl)`.

        Raises:
            PeerError: another process failed, left or did not come.
        """
        with self._device.active():
            self._reducer.finish()
            with self._group.bounded(self._reducer.describe()):
                self._communicator.wait_on_device()

    def run(self, layer: int) -> None:
        """Let gradients be exchanged as soon as they are complete; for `solver.net.after_backward(nccl)`.

        They are exchanged in parts (`reduce_buckets`) while the backward pass goes on. A pass on a GPU, one of several
        in an iteration (`iter_size`) and one with `layer_wise_reduce: false` leave them all to `on_gradients_ready`:
        a GPU that compiles or allocates on its way would wait for a part that waits for a peer that does the same.
        """
        self._called = True


def _address(uid: bytes) -> str:
    """The file at which the processes meet.

    Raises:
        UserError: the uid is not from `NCCL.new_uid`.
    """
    path = Path(os.fsdecode(uid)) if isinstance(uid, bytes) else Path()
    if not path.is_absolute() or not path.name.startswith(_PREFIX):
        raise UserError("NCCL needs the uid that caffe.NCCL.new_uid() gave the program that started the processes")
    return path.as_uri()
