"""The processes that train together: who started them, which of them this one is, and how they agree on an error.

MPI is imported only where a launcher started several processes; a single one needs no MPI library.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from caffepy.errors import CaffepyError, RunError, UserError
from caffepy.parallel.communicators.communicator import GroupCommunicator

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE"),
)
"""What each launcher tells the processes that it starts. Slurm sets SLURM_NTASKS in a batch script too, where nothing
was launched, so the step's variable is the one to ask."""


@dataclass(frozen=True)
class Launcher:
    """What the environment says about who started this process.

    Args:
        name: the launcher, for messages.
        rank: the number that it gave this process.
        size: how many it started; None where it does not say.
        options: what it was told beside their number, where it says so.
    """

    name: str
    rank: int
    size: int | None
    options: str = ""

    @property
    def again(self) -> str:
        """What starts as many processes again: ``mpirun -np 4`` or ``srun -n 4 --mpi=pmix``."""
        return f"srun -n {self.size}{self.options}" if self.name == "srun" else f"mpirun -np {self.size}"


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or None where nobody did."""
    for name, rank, size in _LAUNCHERS:
        if environment.get(rank, "").isdigit() and (environment.get(size, "").isdigit() or name.startswith("a PMIx")):
            count = environment.get(size)
            name = "srun" if _started_by_srun(name, environment) else name
            way = environment.get("SLURM_MPI_TYPE")
            options = f" --mpi={way}" if name == "srun" and way else ""
            return Launcher(name, int(environment[rank]), int(count) if count else None, options)
    return None


def _started_by_srun(name: str, environment: Mapping[str, str]) -> bool:
    """Whether it was srun, whose ``pmi2`` sets Hydra's variables; in an allocation Hydra itself runs within a step."""
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return name == "srun" or (name == "mpiexec" and environment.get("PMI_JOBID") == step)


class World:
    """All processes that train together; this class is the world of a single one, `mpi.MpiWorld` that of several."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.hosts = [socket.gethostname()]
        """The host of each rank."""
        self.machines = [machine_identity()]
        """What tells the ranks' machines apart, whatever they are called."""
        self.local_rank = 0
        """This process's number among those of its host."""
        self.local_size = 1
        self.while_waiting: Callable[[], None] = lambda: None
        """Called while an exchange waits for other ranks; it may raise."""
        self.ended_together = False
        """Whether all ranks have agreed to end."""

    @property
    def host(self) -> str:
        """This process's host name."""
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
        """Run what solver threads ask the main thread to do for them; returns when there is nothing more to do."""

    @property
    def serves(self) -> bool:
        """Whether solver threads need `serve`, because MPI lets the main thread alone call it."""
        return False

    def communicator(self) -> GroupCommunicator | None:
        """A new connection among all ranks, one device a rank; None where there is one rank."""
        return None

    def raise_on_all(self, error: Exception | None) -> None:
        """End all ranks in the same way if any of them met an error; called by all with what they met.

        The root raises the error, for its caller to print; where not all ranks met the same, the message says which
        did.

        Raises:
            SystemExit: on the other ranks, silently, with the error's exit status.
        """
        found = self.all_gather(_describe(error))
        culprits = [rank for rank, entry in enumerate(found) if entry is not None]
        if not culprits:
            return
        self.ended_together = True
        entry = found[culprits[0]]
        assert entry is not None
        text, status = entry
        if self.rank != 0:
            raise SystemExit(status)
        everybody = all(other is not None and other[0] == text for other in found)
        if everybody and error is not None:
            raise error
        kind = UserError if status == UserError.exit_status else RunError
        raise kind(f"{self.name(culprits[0])}: {text}") from error

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


def machine_identity(system: Path = Path("/proc")) -> str:
    """Tells machines apart, whatever they are called: which boot of which kernel, and which network of it.

    Containers of one machine have a network each unless they share the host's: their loopback addresses are not the
    same. Where the system says neither, the host name has to do.

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


def flush_streams() -> None:
    """Let nothing that was printed be lost in a process that ends without the interpreter's shutdown."""
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


def refuse_foreign_launcher(world: World, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what torchrun tells its processes: each would train alone, or as another rank than it believes to be.

    Raises:
        UserError: RANK and WORLD_SIZE do not stand for the processes of `world`; with the command to use.
    """
    told = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if not told or told == {"WORLD_SIZE": "1"} or told == {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}:
        return
    given = " and ".join(f"{name}={value}" for name, value in told.items())
    if len(told) == 1:
        missing = "WORLD_SIZE" if "RANK" in told else "RANK"
        raise UserError(f"the environment has {given} but no {missing}: {_advice('2')}")
    if world.size > 1:
        raise UserError(
            f"the environment has {given}, but MPI says rank {world.rank} of {world.size} processes: "
            "unset RANK and WORLD_SIZE"
        )
    size = told["WORLD_SIZE"]
    raise UserError(
        f"the environment has {given}, as torchrun sets them, but no MPI started this process, which would train "
        f"alone: {_advice(size if size.isdigit() and int(size) > 1 else '2')}"
    )


def _advice(size: str) -> str:
    return (
        f"start with mpirun -np {size} caffepy train …, or caffepy launch --nproc-per-node {size} -- train …; to train "
        "in one process unset RANK and WORLD_SIZE"
    )


def create_world() -> World:
    """The world that this process belongs to.

    Raises:
        MissingExtraError: a launcher started several processes and there is no mpi4py or no MPI library.
        UserError: the launcher belongs to another MPI than mpi4py.
    """
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        return World()
    from caffepy.parallel.communicators.mpi import MpiWorld

    return MpiWorld(launcher)
