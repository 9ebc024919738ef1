"""The launcher of this process, the environments that are refused, and the exit of a process that has joined ranks.

Launchers are Open MPI, MPICH, Slurm, PMIx, and torchrun and others that set its variables.

A process that has joined other ranks leaves them in good order, or it ends them. Python finalises MPI when a process
exits, and MPI_Finalize waits for all ranks. A rank that exits for a reason of its own, such as Ctrl-C while MPI starts,
would wait for ranks that wait for it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from caffepy.errors import UserError, exit_status

# -- the launcher --------------------------------------------------------------------------------------

_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE"),
)
"""The variables that each launcher sets. Slurm sets SLURM_NTASKS in a batch script too, where nothing
was launched, so the step's variable is the one to ask."""
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, Kubernetes' training operators and `caffepy launch` without MPI tell each process."""
SECRET = "CAFFEPY_JOB_SECRET"
"""The environment's variable with the secret of a job whose ranks join at an address."""
LOOPBACK = "127.0.0.1"
_DIGITS = 9


@dataclass(frozen=True)
class StoreAddress:
    """Where ranks without MPI join rank 0's store.

    Args:
        size: the number of ranks.
        host: rank 0's, as this process's environment has it; some launchers give rank 0 itself ``localhost``.
        port: where rank 0 listens.
        near: ``localhost`` means this machine alone.
    """

    size: int
    host: str
    port: int
    near: bool


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process, as far as the environment tells it.

    Args:
        name: the launcher, for messages.
        rank: of this process.
        size: the number of processes; None where it does not say.
        options: its other command-line options, as far as the environment has them.
        store: where the ranks join, if MPI does not connect them.
    """

    name: str
    rank: int
    size: int | None
    options: str = ""
    store: StoreAddress | None = None

    @property
    def again(self) -> str:
        """What starts as many processes again: ``mpirun -np 4`` or ``srun -n 4 --mpi=pmix``; empty where unknown."""
        if self.size is None or self.store is not None:
            return ""
        return f"srun -n {self.size}{self.options}" if self.name == "srun" else f"mpirun -np {self.size}"


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, or None.

    MPI's comes first, except srun, whose variables whatever runs within a step inherits: torchrun, or a shell.
    """
    mpi, told = find_mpi_launcher(environment), _find_told(environment)
    # Programs within a Slurm step inherit its variables: a launcher that was started there knows better.
    inherited = mpi is not None and (mpi.size == 1 or "TORCHELASTIC_RUN_ID" in environment)
    if told is not None and (mpi is None or (inherited and mpi.name in ("srun", "a PMIx launcher"))):
        return told
    return mpi


def _find_told(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that set `VARIABLES`, if they name one of several ranks and an address."""
    rank, size, host, port = (environment.get(name, "") for name in VARIABLES)
    if not host or not all(text.isdecimal() and len(text) <= _DIGITS for text in (rank, size, port)):
        return None
    own = int(port) + port_offset(environment)
    if not (int(rank) < int(size) > 1 and 0 < own < 1 << 16):
        return None
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher without MPI"
    return Launcher(name, int(rank), int(size), store=StoreAddress(int(size), host, own, is_near(environment)))


def port_offset(environment: Mapping[str, str]) -> int:
    """1 where torchrun's own process listens at MASTER_PORT, so that rank 0 takes the next port; else 0."""
    return int(environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def is_near(environment: Mapping[str, str]) -> bool:
    """Whether ``localhost`` means this machine alone: Kubernetes' operators tell it to rank 0 of ranks elsewhere."""
    alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE") is not None
    return alone or "KUBERNETES_SERVICE_HOST" not in environment


def find_mpi_launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher of MPI's that started this process, or None."""
    for name, rank, size in _LAUNCHERS:
        count = environment.get(size, "")
        if is_number(environment.get(rank, "")) and (is_number(count) or (not count and name.startswith("a PMIx"))):
            name = "srun" if _started_by_srun(name, environment) else name
            way = environment.get("SLURM_MPI_TYPE")
            options = f" --mpi={way}" if name == "srun" and way else ""
            return Launcher(name, int(environment[rank]), int(count) if count else None, options)
    return None


def is_number(text: str) -> bool:
    """Whether a launcher could have written this number."""
    return text.isascii() and text.isdecimal() and len(text) < 10


def _started_by_srun(name: str, environment: Mapping[str, str]) -> bool:
    """Whether it was srun, whose ``pmi2`` sets Hydra's variables; in an allocation Hydra itself runs within a step."""
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    return name == "srun" or (name == "mpiexec" and environment.get("PMI_JOBID") == step)


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


def refuse_foreign_launcher(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a RANK and WORLD_SIZE by which this process would train alone, or as another rank than it believes to be.

    Raises:
        UserError: they are not this process's `rank` and `size`, or incomplete; with what to do.
    """
    told = {name: environment[name] for name in VARIABLES[:2] if name in environment}
    own = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    launcher = find_launcher(environment)
    if not told or told in ({"WORLD_SIZE": "1"}, own) or (launcher is not None and launcher.store is not None):
        return
    given = " and ".join(f"{name}={value}" for name, value in told.items())
    missing = [name for name in VARIABLES if not environment.get(name)]
    if len(told) == 2 and (size > 1 or (launcher is not None and not missing)):
        raise UserError(
            f"the environment has {given}, but MPI says rank {rank} of {size} processes: unset RANK and WORLD_SIZE"
        )
    if missing:
        raise UserError(f"the environment has {given} but no {' and '.join(missing)}: {_advice(told)}")
    raise UserError(
        f"the environment has {given} and MASTER_PORT={environment['MASTER_PORT']}: RANK counts from 0 to "
        f"WORLD_SIZE - 1, MASTER_PORT is a port; {_advice(told)}"
    )


def _advice(told: Mapping[str, str]) -> str:
    size = told.get("WORLD_SIZE", "")
    size = size if size.isdecimal() and int(size[:_DIGITS]) > 1 else "2"
    return (
        f"set {', '.join(VARIABLES)} as torchrun does, or start with mpirun -np {size} caffepy train …, or caffepy "
        f"launch --nproc-per-node {size} -- train …; to train in one process unset RANK and WORLD_SIZE"
    )


# -- the exit ------------------------------------------------------------------------------------------

_end: Callable[[int], None] | None = None
"""Ends the ranks that this process has joined and not left."""


def joining(end: Callable[[int], None]) -> None:
    """Have `end` called with an exit status when this process exits without having `left`; called before it joins."""
    global _end
    _end = end


def left() -> None:
    """This process has left the other ranks in good order, or all have agreed on the error with which they end."""
    global _end
    _end = None


def end_unless_left(status: int) -> None:
    """End the joined ranks, if this process has not left them."""
    if _end is None:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further one ends the process, and so the launcher the job
    _end(status)


def _exit() -> None:
    end_unless_left(exit_status(getattr(sys, "last_value", None)))


# Python calls the later one first. An interrupt that comes at that moment would be lost with the function it ends.
atexit.register(_exit)
atexit.register(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) if _end is not None else None)
