"""The world of the processes that MPI started."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.mpi import MainThreadDispatcher, MpiCommunicator, find_started_mpi, load_mpi
from caffepy.distributed.processes.at_exit import joining, left
from caffepy.distributed.processes.launcher import Launcher, check_launcher
from caffepy.distributed.processes.world import World, end_process, flush_streams, machine_identity

T = TypeVar("T")

_POLL = 0.002
"""Seconds between polls of a collective that other ranks have not joined: MPI itself would burn the core."""
_FORWARD_SECONDS = 0.3
"""Time for the launcher to forward printed text: at an abort it drops the rest, or mixes it with its own."""
_ABORT_SECONDS = 3.0
"""How long MPI_Abort may take before the process ends without it."""


def join_mpi(launcher: Launcher) -> MpiWorld:
    """The world of MPI's processes, which this process ends unless it leaves them; errors as of `MpiWorld`."""
    joining(_end_mpi)
    return MpiWorld(launcher)


def _end_mpi(status: int) -> None:
    """End all processes of MPI, unless it has not started or there is no other; then MPI_Finalize waits for none."""
    mpi = find_started_mpi()
    if mpi is not None and mpi.COMM_WORLD.size > 1:
        abort(mpi.COMM_WORLD, status)


def abort(comm: Any, status: int) -> NoReturn:
    """End all processes of an MPI communicator, this one included."""
    flush_streams()
    time.sleep(_FORWARD_SECONDS)
    aborting = threading.Thread(target=comm.Abort, args=(status,), daemon=True)
    aborting.start()
    aborting.join(_ABORT_SECONDS)
    end_process(status)


class MpiWorld(World):
    """The processes of MPI_COMM_WORLD.

    Args:
        launcher: what the environment says about who started them.

    Raises:
        MissingExtraError: no mpi4py or no MPI library.
        UserError: MPI sees other processes than the launcher started.
    """

    transport = "mpi"

    def __init__(self, launcher: Launcher) -> None:
        self._check: Callable[[], None] = lambda: None
        self._mpi = load_mpi()
        self._calls = MainThreadDispatcher(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)
        self._control = self._mpi.COMM_WORLD.Dup()
        check_launcher(launcher, int(self._control.size), self._mpi.Get_library_version())
        hosts, machines = zip(*self.all_gather((socket.gethostname(), machine_identity())), strict=True)
        super().__init__(int(self._control.rank), list(hosts), list(machines))

    def all_gather(self, value: T) -> list[T]:
        self._wait(self._control.Ibarrier())
        gathered: list[T] = self._control.allgather(value)
        return gathered

    def broadcast(self, value: T) -> T:
        """`World.broadcast` by MPI_Bcast: the others' values are not sent anywhere."""
        self._wait(self._control.Ibarrier())
        received: T = self._control.bcast(value)
        return received

    def watch(self, check: Callable[[], None]) -> None:
        self._check = check

    @property
    def serves(self) -> bool:
        return not self._calls.direct

    def serve(self) -> None:
        self._calls.serve()

    def communicator(self, ranks: Sequence[int] = ()) -> Communicator:
        """A new communicator; of some ranks, which are the callers, where `ranks` are given."""
        control = self._control
        comm = control.Create_group(control.group.Incl(list(ranks))) if ranks else control.Dup()
        return MpiCommunicator(self._mpi, comm, self._calls)

    def close(self) -> None:
        """Leave the others; MPI_Finalize waits for all when the process ends."""
        left()

    def end(self, status: int) -> NoReturn:
        abort(self._mpi.COMM_WORLD, status)

    def _wait(self, request: Any) -> None:
        while not request.Test():
            if self.serves:
                self.serve()
            self._check()
            time.sleep(_POLL)
