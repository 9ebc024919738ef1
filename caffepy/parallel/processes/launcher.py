"""Who started this process: Open MPI, MPICH, Slurm or PMIx; and the launchers that are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from caffepy.errors import UserError

_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE"),
)
"""The variables that each launcher sets. Slurm sets SLURM_NTASKS in a batch script too, where nothing
was launched, so the step's variable is the one to ask."""


@dataclass(frozen=True)
class Launcher:
    """What the environment says about who started this process.

    Args:
        name: the launcher, for messages.
        rank: of this process.
        size: the number of processes; None where it does not say.
        options: its other command-line options, as far as the environment has them.
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
        count = environment.get(size, "")
        if _is_count(environment.get(rank, "")) and (_is_count(count) or (not count and name.startswith("a PMIx"))):
            name = "srun" if _started_by_srun(name, environment) else name
            way = environment.get("SLURM_MPI_TYPE")
            options = f" --mpi={way}" if name == "srun" and way else ""
            return Launcher(name, int(environment[rank]), int(count) if count else None, options)
    return None


def _is_count(text: str) -> bool:
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
    """Refuse what torchrun tells its processes: each would train alone, or as another rank than it believes to be.

    Raises:
        UserError: RANK and WORLD_SIZE are not this process's `rank` and `size`; with the command to use.
    """
    told = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if name in environment}
    if not told or told == {"WORLD_SIZE": "1"} or told == {"RANK": str(rank), "WORLD_SIZE": str(size)}:
        return
    given = " and ".join(f"{name}={value}" for name, value in told.items())
    if len(told) == 1:
        missing = "WORLD_SIZE" if "RANK" in told else "RANK"
        raise UserError(f"the environment has {given} but no {missing}: {_advice('2')}")
    if size > 1:
        raise UserError(
            f"the environment has {given}, but MPI says rank {rank} of {size} processes: unset RANK and WORLD_SIZE"
        )
    count = told["WORLD_SIZE"]
    raise UserError(
        f"the environment has {given}, as torchrun sets them, but no MPI started this process, which would train "
        f"alone: {_advice(count if _is_count(count) and int(count) > 1 else '2')}"
    )


def _advice(size: str) -> str:
    return (
        f"start with mpirun -np {size} caffepy train …, or caffepy launch --nproc-per-node {size} -- train …; to train "
        "in one process unset RANK and WORLD_SIZE"
    )
