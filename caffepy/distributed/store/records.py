"""Records that ranks exchange about themselves: members, device statuses, failures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from caffepy.errors import RunError

_SILENT_SECONDS = 2.0
"""Heartbeats come every half second: a rank without any for so long is stopped, or its network is."""

_LONGEST_MESSAGE = 4096
"""Characters; a message must fit into the kernel's buffers, because no rank may wait for one that is stopped."""


@dataclass(frozen=True)
class Member:
    """A rank's process.

    Args:
        host: the machine's name.
        machine: the machine's identity, whatever it is called.
        process: the process's number there.
    """

    host: str
    machine: str
    process: int

    def name(self, rank: int) -> str:
        """The process as messages call it."""
        return f"rank {rank} on {self.host} (process {self.process})"


@dataclass(frozen=True)
class DeviceStatus:
    """What one device is doing.

    Args:
        rank: its process.
        host: its machine.
        pid: its process's number there.
        device: ``0`` for a GPU's number, ``CPU``; empty for a process group, which has one a rank, and before a process
            has made its devices.
        iteration: the iteration it is in.
        collectives: how many operations that need all devices it has begun; all devices begin the same ones.
        waiting: the operation that it waits in, empty where it computes.
        seconds: for how long it has waited or computed, without the time in which its process was suspended.
        reading: what it waits for to be read, empty where its data are there; then `seconds` is for how long.
        starting: its first iteration is not over.
        silent: seconds since its rank was heard of; known to the store.
        left: its rank has left in good order; known to the store.
    """

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    iteration: int = 0
    collectives: int = 0
    waiting: str = ""
    seconds: float = 0.0
    reading: str = ""
    starting: bool = False
    silent: float = 0.0
    left: bool = False

    def __str__(self) -> str:
        device = f", device {self.device}" if self.device else ""
        return f"rank {self.rank} on {self.host}, process {self.pid}{device}"

    @property
    def is_silent(self) -> bool:
        """Whether heartbeats have stopped."""
        return self.silent > _SILENT_SECONDS

    @property
    def doing(self) -> str:
        """What a straggler is doing, and for how long."""
        if self.is_silent:
            return f"was last heard of {self.silent:.0f} s ago (is it suspended?)"
        if self.waiting:
            return f"waits in {self.waiting} since {self.seconds:.0f} s"
        return f"{f'waits for {self.reading} to be read' if self.reading else 'computes'} since {self.seconds:.0f} s"


@dataclass(frozen=True)
class Failure:
    """Why a job ends.

    Args:
        message: one line that names the rank at fault.
        status: exit status of all processes; 0: rank 0 has left in good order.
        reported: the user has been told. Until then rank 0 alone hears of a failure.
        error: the exception, where it was raised in this process; not sent to others.
    """

    message: str
    status: int = RunError.exit_status
    reported: bool = False
    error: BaseException | None = None

    def as_sent(self) -> Failure:
        """The failure as other processes hear of it."""
        return replace(self, message=self.message[:_LONGEST_MESSAGE], error=None)
