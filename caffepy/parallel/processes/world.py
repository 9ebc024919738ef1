"""The processes that train together: their ranks and hosts, and how they agree on an error."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from caffepy.errors import CaffepyError, RunError, UserError
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.processes.machine import machine_identity

T = TypeVar("T")


class World:
    """All processes that train together. This class is the world of a single one, `mpi_world.MpiWorld` of several."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.hosts = [socket.gethostname()]
        """The host of each rank."""
        self.machines = [machine_identity()]
        """The `machine_identity` of each rank."""
        self.local_rank = 0
        """This process's index among those of its machine."""
        self.local_size = 1
        self.while_waiting: Callable[[], None] = lambda: None
        """Called while a collective of this class waits for other ranks; it may raise."""
        self.ended_together = False
        """Whether all ranks have agreed to end."""

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def several_hosts(self) -> bool:
        """Whether the ranks run on more than one machine."""
        return self.local_size < self.size

    def name(self, rank: int) -> str:
        """A rank as messages call it: ``rank 1 on host7``."""
        return f"rank {rank} on {self.hosts[rank]}"

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks. Called by the main thread of all ranks."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The root's value. Called by the main thread of all ranks."""
        return self.all_gather(value)[0]

    def serve(self) -> None:
        """Run the calls that solver threads have dispatched to the main thread; returns when none is queued."""

    @property
    def serves(self) -> bool:
        """Whether solver threads need `serve`, because MPI lets the main thread alone call it."""
        return False

    def communicator(self) -> Communicator | None:
        """A new communicator of all ranks; None where there is one rank."""
        return None

    def raise_on_all(self, error: Exception | None) -> None:
        """End all ranks in the same way if any of them failed. Called by all ranks, each with its own error or None.

        The root raises the error, for its caller to print; where not all ranks have the same error, the message says
        which rank failed.

        Raises:
            SystemExit: on the other ranks, silently, with the error's exit status.
        """
        errors = self.all_gather(_describe(error))
        failed = [rank for rank, entry in enumerate(errors) if entry is not None]
        if not failed:
            return
        self.ended_together = True
        entry = errors[failed[0]]
        assert entry is not None
        text, status = entry
        if self.rank != 0:
            raise SystemExit(status)
        on_all = all(other is not None and other[0] == text for other in errors)
        if on_all and error is not None:
            raise error
        kind = UserError if status == UserError.exit_status else RunError
        raise kind(f"{self.name(failed[0])}: {text}") from error

    def run_on_all(self, action: Callable[[], T]) -> T:
        """The result of `action`, which every rank calls, or the error that `raise_on_all` makes of it."""
        result: list[T] = []
        try:
            result.append(action())
            error = None
        except Exception as failure:
            error = failure
        self.raise_on_all(error)
        return result[0]

    def end(self, status: int) -> NoReturn:
        """End this process, and with it the world, at once: nothing is waited for."""
        flush_streams()
        os._exit(status)


def flush_streams() -> None:
    """Flush stdout and stderr: `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _describe(error: Exception | None) -> tuple[str, int] | None:
    if error is None:
        return None
    if isinstance(error, CaffepyError):
        return str(error), error.exit_status
    return f"{type(error).__name__}: {error}", RunError.exit_status
