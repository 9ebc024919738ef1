"""What devices that train together ask of each other: one protocol, whatever carries it.

`local.py` connects the threads of one process, `mpi.py` processes through host buffers, `hierarchical.py` threads of
several processes, `nccl.py` GPUs. Every device calls the same operations in the same order; each call waits for the
others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from caffepy.backend.types import Array

if TYPE_CHECKING:
    from caffepy.parallel.communicators.collectives import Operation, Work


class Communicator(Protocol):
    """One device's end of the connection.

    Once `abort` was called, by whichever thread, waits end and further calls raise `AbortedError`.
    """

    @property
    def rank(self) -> int:
        """This device's number, from 0."""

    @property
    def size(self) -> int:
        """How many devices are connected."""

    def all_reduce(self, array: Array, average: bool = True) -> None:
        """array = the sum, or the mean, of all devices' arrays, in place: (P,), contiguous, equal dtype everywhere.

        Raises:
            AbortedError: another device failed.
            PeerError: the connection failed.
        """

    def broadcast(self, array: Array, root: int = 0) -> None:
        """array = the array of device `root`, in place; arguments and errors as in `all_reduce`."""

    def barrier(self) -> None:
        """Wait until all devices are here."""

    def sum(self, values: Any) -> Any:
        """The sum of all devices' float64 host arrays, always in the same order; a new array."""

    def abort(self) -> None:
        """End all waits of this process; callable from any thread, and twice."""

    def close(self) -> None:
        """Give back what the connection holds; callable twice."""


class Exchange(Protocol):
    """An average over all devices that was begun."""

    def progress(self) -> None:
        """Look after it for a moment: some MPIs move bytes only while they are called."""

    def finish(self) -> None:
        """Wait for its end, or have the device wait for it; the average is in the array only for what comes then.

        Raises:
            AbortedError: another device failed.
            PeerError: the connection failed.
        """


class OverlappingCommunicator(Communicator, Protocol):
    """A communicator whose averages can go on while the device computes."""

    @property
    def compresses(self) -> bool:
        """Whether averages that are begun travel in two bytes a number; `all_reduce` never does that."""

    @property
    def overlaps_compute(self) -> bool:
        """Whether to begin early is worth while: what was begun goes on by itself, or at least nobody waits for it."""

    def all_reduce_async(self, array: Array, timed: AbstractContextManager[None]) -> Exchange:
        """Begin array = the mean of all devices' arrays; all devices begin, and finish, theirs in the same order.

        `timed` is entered where the exchange begins and left where it has ended, each time with the stream current on
        which it is.
        """


class GroupCommunicator(Communicator, Protocol):
    """A communicator with every operation there is, for `caffepy.distributed`. Each may go on while others begin."""

    memory: str
    """Where its arrays lie: ``host`` or ``gpu``."""

    def start(self, operation: Operation) -> Work:
        """Begin an operation; its arrays are left alone until it has ended. All devices begin the same collectives in
        the same order.

        Raises:
            AbortedError: another device failed.
            PeerError: the connection failed.
        """

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new contiguous array in its memory."""
