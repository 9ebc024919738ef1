"""MPI: the world of several processes, and the communicator of host buffers between them. Alone in importing mpi4py."""

from __future__ import annotations

import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class than TimeoutError until Python 3.11
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from caffepy.errors import AbortedError, MissingExtraError, PeerError, UserError
from caffepy.parallel.communicators.communicator import GroupCommunicator
from caffepy.parallel.communicators.mpi_operations import MpiOperations
from caffepy.parallel.processes.world import Launcher, World, flush_streams, machine_identity

T = TypeVar("T")

_POLL = 0.002
"""Seconds between looks at an exchange that other ranks have not joined: MPI itself would burn the core."""
_FORWARD_SECONDS = 0.3
"""What the launcher is given to pass on what was printed: at an abort it drops the rest, or mixes it with its own."""
_ABORT_SECONDS = 3.0
"""How long MPI_Abort may take before the process ends without it."""


def load_mpi() -> Any:
    """mpi4py's MPI module, initialised.

    Raises:
        MissingExtraError: mpi4py or the MPI library is not installed.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise MissingExtraError("mpi4py", "mpi", "to train on several ranks") from None
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(f"an MPI library for mpi4py ({error})", "mpi", "to train on several ranks") from error
    return MPI


class MainThreadDispatcher:
    """Lets solver threads call MPI, themselves or, where MPI forbids that, through the main thread.

    Args:
        direct: MPI provides MPI_THREAD_MULTIPLE.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._main = threading.get_ident()
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._aborted = threading.Event()

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`.

        Raises:
            AbortedError: `abort` was called first.
        """
        if self._aborted.is_set():
            raise AbortedError("training was stopped")
        if self.direct or threading.get_ident() == self._main:
            return function()
        future: Future[T] = Future()
        self._calls.put((function, future))
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeoutError:
                if self._aborted.is_set():
                    raise AbortedError("training was stopped") from None

    def serve(self) -> None:
        """On the main thread: run what is asked for, until nothing has been for a moment."""
        while True:
            try:
                function, future = self._calls.get(timeout=_POLL)
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def abort(self) -> None:
        """Refuse further calls and let go those who wait."""
        self._aborted.set()


class MpiWorld(World):
    """The processes of MPI_COMM_WORLD.

    Args:
        launcher: who started them.

    Raises:
        MissingExtraError: no mpi4py or no MPI library.
        UserError: MPI sees other processes than the launcher started.
    """

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self._mpi = load_mpi()
        self._calls = MainThreadDispatcher(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)
        self._control = self._mpi.COMM_WORLD.Dup()
        self.rank = int(self._control.rank)
        self.size = int(self._control.size)
        check_launcher(launcher, self.size, self._mpi.Get_library_version())
        machines = self.all_gather((socket.gethostname(), machine_identity()))
        self.hosts = [host for host, _ in machines]
        self.machines = [machine for _, machine in machines]
        own = self.machines[self.rank]
        self.local_size = self.machines.count(own)
        self.local_rank = self.machines[: self.rank].count(own)

    def all_gather(self, value: T) -> list[T]:
        self._wait(self._control.Ibarrier())
        gathered: list[T] = self._control.allgather(value)
        return gathered

    def broadcast(self, value: T) -> T:
        """`World.broadcast` by MPI_Bcast: the others' values are not sent anywhere."""
        content = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        size = np.array([len(content)], np.int64)
        self._wait(self._control.Ibcast(size, 0))
        if self.rank != 0:
            content = bytearray(int(size[0]))
        self._wait(self._control.Ibcast([content, self._mpi.BYTE], 0))
        received: T = value if self.rank == 0 else pickle.loads(content)
        return received

    def serve(self) -> None:
        self._calls.serve()

    @property
    def serves(self) -> bool:
        return not self._calls.direct

    def communicator(self) -> GroupCommunicator:
        return MpiCommunicator(self._mpi, self._control.Dup(), self._calls)

    def end(self, status: int) -> NoReturn:
        flush_streams()
        time.sleep(_FORWARD_SECONDS)
        aborting = threading.Thread(target=self._mpi.COMM_WORLD.Abort, args=(status,), daemon=True)
        aborting.start()
        aborting.join(_ABORT_SECONDS)
        super().end(status)

    def _wait(self, request: Any) -> None:
        while not request.Test():
            if self.serves:
                self.serve()
            self.while_waiting()
            time.sleep(_POLL)


def check_launcher(launcher: Launcher, size: int, library: str) -> None:
    """Refuse a launcher of another MPI: each process would train alone and believe itself the root.

    Raises:
        UserError: on the process that the launcher calls 0.
        SystemExit: on the others, silently.
    """
    if launcher.size in (None, size):
        return
    if launcher.rank != 0:
        raise SystemExit(UserError.exit_status)
    name = " ".join(library.split("\n")[0].split(",")[0].split())
    own = Path(sys.executable).parent / "mpirun"
    remedy = str(own) if own.exists() else "the mpirun that came with that library"
    cause = "launcher and library belong to different MPIs. Start with"
    if launcher.name == "srun":
        way = launcher.options.strip() or "--mpi=none"
        cause = f"srun's {way} is none that this library knows. Start with caffepy launch, which finds one, or with"
    raise UserError(
        f"{launcher.name} started {launcher.size} processes, but {name}, the MPI library that "
        f"mpi4py uses, sees {size}: {cause} {remedy}"
    )


class MpiCommunicator(MpiOperations):
    """A `GroupCommunicator` of host arrays, one device a process.

    Args:
        mpi: mpi4py's module.
        comm: an MPI communicator of its own.
        calls: carries the calls to a thread that may make them.
    """

    def __init__(self, mpi: Any, comm: Any, calls: MainThreadDispatcher) -> None:
        super().__init__(mpi, comm, calls)
        self.rank = int(comm.rank)
        self.size = int(comm.size)

    def all_reduce(self, array: Any, average: bool = True) -> None:
        self._call("all-reduce", lambda: self._comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM))
        if average:
            array /= self.size

    def broadcast(self, array: Any, root: int = 0) -> None:
        self._call("broadcast", lambda: self._comm.Bcast(array, root))

    def barrier(self) -> None:
        self._call("barrier", self._patient_barrier)

    def sum(self, values: Any) -> Any:
        rows = np.empty((self.size, *np.shape(values)), np.float64)
        own = np.ascontiguousarray(values, np.float64)
        self._call("all-gather", lambda: self._comm.Allgather(own, rows))
        return np.add.reduce(rows, axis=0)

    def abort(self) -> None:
        self._calls.abort()

    def close(self) -> None:
        """Nothing: MPI_Finalize frees the communicator; to free it here would take all ranks at once."""

    def _call(self, what: str, function: Callable[[], None]) -> None:
        try:
            self._calls.call(function)
        except self._mpi.Exception as error:
            raise PeerError(f"MPI's {what} failed: {error}") from error

    def _patient_barrier(self) -> None:
        """A barrier may last long (a snapshot, a test); it leaves the core to those who work."""
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(_POLL)
