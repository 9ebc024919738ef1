"""The processes that train together: their ranks, hosts and machines, and how they agree on an error."""

from __future__ import annotations

import logging
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.store.store import ControlChannel
from caffepy.errors import InternalError, RunError, UserError, describe, exit_status

logger = logging.getLogger(__name__)


def machine_identity(system: Path = Path("/proc")) -> str:
    """The boot of the kernel and its network namespace, which tell machines apart whatever their host names.

    Containers of one machine have a network each unless they share the host's: their loopback addresses are not the
    same. The host name where the system tells neither.

    Args:
        system: where Linux keeps what it says of itself.
    """
    try:
        boot = (system / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    try:
        network = (system / "self/ns/net").stat()
    except OSError:
        return f"{boot}/{socket.gethostname()}"
    return f"{boot}/{network.st_dev}:{network.st_ino}"


def kernel_of(machine: str) -> str:
    """The part of a `machine_identity` that the containers of one machine have in common: they share its GPUs."""
    return machine.partition("/")[0]


def own_addresses() -> list[str]:
    """Addresses under which other machines may reach this one, the likeliest first."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the interface that leads outward
            addresses.append(probe.getsockname()[0])
        except OSError as error:
            logger.debug("no route outward: %s", error)
    try:
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError as error:
        logger.debug("this host's name has no address: %s", error)
    return [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]


T = TypeVar("T")


class World(ABC):
    """All processes that train together, as one of them sees them.

    Args:
        rank: this process's number.
        hosts: the host of each rank.
        machines: the `machine_identity` of each rank.
    """

    transport = "local"
    """What carries arrays in host memory from rank to rank: ``mpi``, ``tcp``; ``local`` where there is one rank."""

    def __init__(self, rank: int, hosts: list[str], machines: list[str]) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.hosts = hosts
        self.machines = machines
        self.ended_together = False
        """Whether all ranks have agreed to end."""
        self.channel: ControlChannel | None = None
        """The control channel by which the ranks have met; None where they met in another way."""

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks. Called by the main thread of all ranks.

        Args:
            value: what `store.values.pack` takes.
        """

    def broadcast(self, value: T) -> T:
        """The root's value. Called by the main thread of all ranks."""
        return self.all_gather(value)[0]

    @abstractmethod
    def watch(self, check: Callable[[], None]) -> None:
        """Have `check`, which may raise, called while a collective of this class waits for other ranks."""

    @property
    @abstractmethod
    def serves(self) -> bool:
        """Whether solver threads need `serve`, because MPI lets the main thread alone call it."""

    @abstractmethod
    def serve(self) -> None:
        """Run the calls that solver threads have dispatched to the main thread; returns when none is queued."""

    @abstractmethod
    def communicator(self) -> Communicator | None:
        """A new communicator of all ranks; None where there is one rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks in good order, the last that a rank does."""

    @abstractmethod
    def end(self, status: int) -> NoReturn:
        """End this process, and with it the world, at once: nothing is waited for."""

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the other ranks, unless they have not agreed on the error: then the exit of this process ends them."""
        if error is None or self.ended_together or self.size == 1:
            self.close()
        elif self.channel is not None:
            self.channel.fail(f"{self.name(self.rank)}: {describe(error)}")

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def local_rank(self) -> int:
        """This process's index among those of its machine."""
        return self.machines[: self.rank].count(self.machines[self.rank])

    @property
    def local_size(self) -> int:
        return self.machines.count(self.machines[self.rank])

    @property
    def several_hosts(self) -> bool:
        """Whether the ranks run on more than one machine."""
        return self.local_size < self.size

    def name(self, rank: int) -> str:
        """A rank as messages call it: ``rank 1 on host7``."""
        return f"rank {rank} on {self.hosts[rank]}"

    def raise_on_all(self, error: Exception | None) -> None:
        """End all ranks in the same way if any of them failed. Called by all ranks, each with its own error or None.

        The root raises the error, for its caller to print; where not all ranks have the same error, the message says
        which rank failed.

        Raises:
            SystemExit: on the other ranks, silently, with the error's exit status.
        """
        errors = self.all_gather(None if error is None else (describe(error), exit_status(error)))
        first = next(((rank, *entry) for rank, entry in enumerate(errors) if entry is not None), None)
        if first is None:
            return
        self.ended_together = True
        failed, text, status = first
        if self.rank != 0:
            raise SystemExit(status)
        on_all = all(other is not None and other[0] == text for other in errors)
        if on_all and error is not None:
            raise error
        kind = next((kind for kind in (UserError, InternalError) if kind.exit_status == status), RunError)
        raise kind(f"{self.name(failed)}: {text}") from error

    def run_on_all(self, action: Callable[[], T]) -> T:
        """The result of `action`, which every rank calls, or the error that `raise_on_all` makes of it."""
        try:
            result = action()
        except Exception as error:
            self.raise_on_all(error)
            raise
        self.raise_on_all(None)
        return result


class SingleProcess(World):
    """A process that trains alone."""

    serves = False

    def __init__(self) -> None:
        super().__init__(0, [socket.gethostname()], [machine_identity()])

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def watch(self, check: Callable[[], None]) -> None: ...

    def serve(self) -> None: ...

    def communicator(self) -> None: ...

    def close(self) -> None: ...

    def end(self, status: int) -> NoReturn:
        end_process(status)


def end_process(status: int) -> NoReturn:
    """End this process at once, with what it has printed."""
    flush_streams()
    os._exit(status)


def flush_streams() -> None:
    """Flush stdout and stderr: `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
