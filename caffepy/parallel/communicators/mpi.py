"""MPI's communicator of host arrays, one device a process. Alone in importing mpi4py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from caffepy.errors import MissingExtraError, PeerError
from caffepy.parallel.communicators.dispatcher import MainThreadDispatcher
from caffepy.parallel.communicators.mpi_operations import MpiOperations

_POLL = 0.002
"""Seconds between looks at a barrier."""


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
