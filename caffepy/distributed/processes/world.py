"""The processes that train together: their ranks, hosts and machines, and how they agree on an error.

There are three worlds: a single process, the processes that MPI started, and processes that joined rank 0's store
without MPI. `create_world` chooses. MPI is loaded only where its launcher started several processes. Processes without
MPI exchange plain Python values through the store; values are read without unpickling anything.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.mpi import MainThreadDispatcher, MpiCommunicator, find_started_mpi, load_mpi
from caffepy.distributed.communicators.store_communicator import StoreCommunicator
from caffepy.distributed.processes.launcher import (
    Launcher,
    StoreAddress,
    check_launcher,
    find_launcher,
    find_mpi_launcher,
    joining,
    left,
)
from caffepy.distributed.store.client import ControlClient
from caffepy.distributed.store.server import find_secret, join_store, listen
from caffepy.distributed.store.store import ControlChannel, MemoryStore, Store, lost_from_training
from caffepy.distributed.store.wire import Failure, Member, Value, pack, unpack
from caffepy.errors import (
    AbortedError,
    CaffepyError,
    InternalError,
    PeerError,
    RunError,
    UserError,
    describe,
    exit_status,
)

# -- the contract, and a single process ----------------------------------------------------------------

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
            value: what `store.wire.pack` takes.
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
        # All ranks call this, also those without an error: a rank that went on alone would wait for the others for
        # ever.
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


# -- processes of MPI ----------------------------------------------------------------------------------

_POLL = 0.002
"""Seconds between polls of a collective that other ranks have not joined: MPI itself would burn the core."""
_FORWARD_SECONDS = 0.3
"""Time for the launcher to forward printed text: at an abort it drops the rest, or mixes it with its own."""
_ABORT_SECONDS = 3.0
"""How long MPI_Abort may take before the process ends without it."""


def join_mpi(launcher: Launcher) -> MpiWorld:
    """The world of MPI's processes, which this process ends unless it leaves them; errors as of `MpiWorld`."""
    # Registered before MPI starts: Ctrl-C during its start must end the other ranks too.
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
    # What this rank has printed must reach the launcher first; MPI_Abort makes it drop the rest.
    time.sleep(_FORWARD_SECONDS)
    # In a thread, because MPI_Abort itself may hang, for example where the network does.
    aborting = threading.Thread(target=comm.Abort, args=(status,), daemon=True)
    aborting.start()
    aborting.join(_ABORT_SECONDS)
    end_process(status)


class MpiWorld(World):
    """The processes of MPI_COMM_WORLD.

    Args:
        launcher: their launcher, as far as the environment tells it.

    Raises:
        MissingExtraError: no mpi4py or no MPI library.
        UserError: MPI sees other processes than the launcher started.
    """

    transport = "mpi"

    def __init__(self, launcher: Launcher) -> None:
        self._check: Callable[[], None] = lambda: None
        self._mpi = load_mpi()
        self._calls = MainThreadDispatcher(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)
        # A communicator of its own: a script's calls on COMM_WORLD cannot be mixed up with these.
        self._control = self._mpi.COMM_WORLD.Dup()
        check_launcher(launcher, int(self._control.size), self._mpi.Get_library_version())
        hosts, machines = zip(*self.all_gather((socket.gethostname(), machine_identity())), strict=True)
        super().__init__(int(self._control.rank), list(hosts), list(machines))

    def all_gather(self, value: T) -> list[T]:
        # The wait happens in a barrier that can be polled, so that `check` is asked meanwhile. Behind it the blocking
        # call finds all ranks there.
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


# -- processes that share a store ----------------------------------------------------------------------

_JOIN_SECONDS = 300.0
"""How long ranks wait for each other: a cluster starts them one after the other."""
_POLL_SECONDS = 0.2
"""Between looks whether this process has to end, while a value is waited for."""
_FAILURE_SECONDS = 3.0
"""How long a failed access to the store waits for the monitor, which knows the rank at fault, to end the run."""
_LEAVE_SECONDS = 10.0
"""How long rank 0 stays for the others to leave in good order."""
_END_SECONDS = 3.0
"""How long rank 0 stays after a failure, so that the others hear of it and not of rank 0's end."""


class StoreWorld(World):
    """The processes that share rank 0's store.

    Args:
        rank: this process's number.
        address: where rank 0 listens.
        timeout: longest wait for all to come, in seconds.

    Raises:
        UserError: rank 0 cannot listen there, or refuses this rank.
        PeerError: not all came in time.
    """

    transport = "tcp"
    serves = False

    def __init__(self, rank: int, address: StoreAddress, timeout: float = _JOIN_SECONDS) -> None:
        self._check: Callable[[], None] = lambda: None
        self._exchanges = 0
        self._communicators = 0
        where = f"{address.host}:{address.port}"
        secret = find_secret(os.environ, "training without MPI", where, warns=rank == 0)
        own = Member(socket.gethostname(), machine_identity(), os.getpid())

        def connect() -> ControlChannel:
            at = address.host, address.port
            if rank == 0:
                return listen(MemoryStore(address.size, lost_from_training), own, at, secret, address.near)
            # While rank 0 is suspended its answers are late: how long that may last is the watchdog's to judge.
            return ControlClient(lambda: ([at], secret), rank, address.size, own, timeout, grace=timeout)

        members, self._store = join_store(rank, own, connect, timeout, f"the ranks' rendezvous at {where}")
        super().__init__(rank, [member.host for member in members], [member.machine for member in members])
        self.channel = self._store

    def all_gather(self, value: T) -> list[T]:
        key = self._next_key()
        # All values go through rank 0, which has the store: two messages for each rank, not one for each pair.
        if self.rank != 0:
            self._store.put(f"{key}/{self.rank}", pack(value), 1)
            gathered: list[T] = self._take(key, 0)
            return gathered
        values = [value, *(self._take(f"{key}/{rank}", rank) for rank in range(1, self.size))]
        self._store.put(key, pack(values), self.size - 1)
        return values

    def broadcast(self, value: T) -> T:
        key = self._next_key()
        if self.rank != 0:
            received: T = self._take(key, 0)
            return received
        self._store.put(key, pack(value), self.size - 1)
        return value

    def watch(self, check: Callable[[], None]) -> None:
        self._check = check

    def serve(self) -> None:
        """Nothing: any thread may use the store."""

    def communicator(self) -> Communicator:
        self._communicators += 1
        return StoreCommunicator(_Arrays(self._store, f"{self._communicators}:"), self.rank, self.size, None)

    def close(self) -> None:
        self._store.leave([])
        self._store.wait_alone(_LEAVE_SECONDS)
        self._store.close()

    def end(self, status: int) -> NoReturn:
        # On rank 0: without its store the others would report the end of rank 0 and not the failure.
        self._store.wait_alone(_END_SECONDS)
        end_process(status)

    def _next_key(self) -> str:
        self._exchanges += 1
        return f"exchange {self._exchanges}"

    def _take(self, key: str, owner: int) -> Any:
        try:
            # Without a limit of its own: the watchdog judges how long a wait may be, and `check` raises its verdict.
            while (value := self._store.take(key, _POLL_SECONDS, owner)) is None:
                self._check()
            return unpack(value)
        except PeerError:
            # The monitor hears the cause of a broken connection a moment later; its message is the better one.
            end = time.monotonic() + _FAILURE_SECONDS
            while time.monotonic() < end:
                self._check()
                time.sleep(_POLL_SECONDS / 10)
            raise


class _Arrays(Store):
    """One communicator's part of the store; to abort it concerns this process alone.

    Args:
        store: the ranks'.
        prefix: of its keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._stopped = Event()

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        with self._failing_late():
            self._store.put(self._prefix + key, value, reads)

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        with self._failing_late():
            return self._store.take(self._prefix + key, seconds, owner)

    def publish(self, failure: Failure) -> None:
        self._stopped.set()

    @contextmanager
    def _failing_late(self) -> Iterator[None]:
        """Let a failure that ends a wait be told by the monitor, which knows more, and which ends all waits here."""
        if self._stopped.is_set():
            raise AbortedError("training was stopped")
        try:
            yield
        except PeerError as error:
            if self._stopped.wait(_FAILURE_SECONDS):
                raise AbortedError("training was stopped") from error
            raise


# -- the choice ----------------------------------------------------------------------------------------


def create_world() -> World:
    """The world that this process belongs to.

    Raises:
        MissingExtraError: MPI's launcher started several processes and there is no mpi4py or no MPI library.
        UserError: the launcher belongs to another MPI than mpi4py, or rank 0's address cannot be used.
        PeerError: without MPI, not all ranks came in time.
    """
    launcher = find_launcher()
    if launcher is not None and launcher.store is not None:
        return StoreWorld(launcher.rank, launcher.store)
    return create_mpi_world()


def raise_together(error: CaffepyError) -> NoReturn:
    """Raise an error that this rank has met before it joined the others, so that one of them prints it.

    Ranks that have met none hear of it where they first agree, in `P2PManager`.

    Raises:
        CaffepyError: the error, on the root, with the rank that has met it; else SystemExit, as `World.raise_on_all`.
    """
    try:
        world = create_world()
    except CaffepyError:  # there is no MPI to agree by
        raise error from None
    with world:
        world.raise_on_all(error)
    raise error


def create_mpi_world() -> World:
    """The world of MPI's processes, alone where no launcher of MPI's started this one; errors as `create_world`."""
    launcher = find_mpi_launcher()
    if launcher is None or launcher.size == 1:
        return SingleProcess()

    return join_mpi(launcher)
