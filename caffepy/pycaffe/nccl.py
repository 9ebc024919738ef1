"""Training with one process per device, as in Caffe's `python/train.py` (pycaffe's `NCCL`; Caffe's `parallel.cpp`).

The processes rendezvous through a file named by the uid, so they must run on one host. Arrays travel by NCCL between
GPUs and by TCP between CPUs. For several hosts use `caffepy train` under mpirun.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from caffepy.distributed.data_parallel import gradient_communicator
from caffepy.distributed.default import connect
from caffepy.distributed.reducer import Reducer
from caffepy.errors import UserError
from caffepy.logs.trace import NO_TRACE
from caffepy.net.parameters import bucket_count
from caffepy.pycaffe.core.errors import check_type
from caffepy.pycaffe.mode import mode
from caffepy.pycaffe.solver import Solver

_PREFIX = "caffepy-nccl-"


def has_nccl() -> bool:
    """Return whether `NCCL` can be used. Always True: on CPUs it does not need the library."""
    return True


class NCCL:
    """One process's member of a group of solvers. All processes must construct theirs at about the same time.

    `set_solver_count` sets the group's size, `set_solver_rank` this process's rank.

    Args:
        solver: the solver whose parameters and gradients are exchanged.
        uid: the result of `new_uid`, called once by the program that starts the processes.

    Raises:
        ArgumentTypeError: `solver` is no solver.
        UserError: the uid is invalid, or the rank is too large.
        PeerError: another process did not join in time, or failed.
        MissingExtraError: `set_mode_gpu` was called, and NCCL or CuPy is not installed.
    """

    def __init__(self, solver: Solver, uid: bytes) -> None:
        check_type("NCCL", solver, Solver)
        net = solver.net.net
        self._parameters = net.parameters
        self._device = solver.device
        self._group = connect(
            "nccl" if mode.gpu else "tcp",
            _address(uid),
            rank=mode.solver_rank,
            world_size=mode.solver_count,
            device_id=mode.device if mode.gpu else None,
        )
        in_parts = solver.param.layer_wise_reduce and solver.param.iter_size == 1 and not net.backend.asynchronous
        buckets = bucket_count(net.param) if in_parts else 1
        self._communicator = gradient_communicator(self._group)
        self._called = False
        """Whether `run` is registered with the net, so that gradients may be exchanged during the backward pass."""
        waiting = self._group.bounded
        with self._device.active():
            self._reducer = Reducer(net, self._communicator, buckets, lambda: self._called, waiting, NO_TRACE)
        # Children of multiprocessing exit without running atexit handlers.
        Finalize(self, self._group.destroy, exitpriority=10)

    @staticmethod
    def new_uid() -> bytes:
        """Return a unique id for a group; the program that starts the processes passes it to all."""
        return os.fsencode(Path(tempfile.gettempdir()).absolute() / f"{_PREFIX}{secrets.token_hex(16)}")

    def bcast(self) -> None:
        """Broadcast rank 0's parameters.

        Raises:
            PeerError: another process failed, left or did not join.
        """
        with self._device.computing(), self._group.bounded("the root's weights"):
            self._communicator.broadcast(self._parameters.data, root=0)
            self._communicator.wait_on_device()
            self._parameters.written()

    def on_gradients_ready(self) -> None:
        """Average the gradients over all processes; called through `solver.add_callback(nccl)`.

        Raises:
            PeerError: another process failed, left or did not join.
        """
        with self._device.active():
            self._reducer.finish()
            with self._group.bounded(self._reducer.describe()):
                self._communicator.wait_on_device()

    def run(self, layer: int) -> None:
        """Exchange gradients as soon as they are complete; called through `solver.net.after_backward(nccl)`.

        Buckets (`reduce_buckets`) are exchanged during the backward pass. `on_gradients_ready` exchanges all gradients
        instead on GPUs, with `iter_size` above 1 and with `layer_wise_reduce: false`. On GPUs overlap could deadlock: a
        pass that compiles or allocates waits for a collective, and the peer does the same.
        """
        self._called = True


def _address(uid: bytes) -> str:
    """Return the rendezvous file.

    Raises:
        UserError: the uid is not from `NCCL.new_uid`.
    """
    path = Path(os.fsdecode(uid)) if isinstance(uid, bytes) else Path()
    if not path.is_absolute() or not path.name.startswith(_PREFIX):
        raise UserError("NCCL needs the uid that caffe.NCCL.new_uid() gave the program that started the processes")
    return path.as_uri()
