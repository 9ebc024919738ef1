"""The line that starts several processes: how Open MPI, MPICH and Intel MPI each want to be told.

Owns which launcher is installed and how it is spoken to; srun is `slurm.py`'s. Cores are never bound: every process
takes its own (`affinity.py`), and each thread those near its GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caffepy.errors import ConfigError
from caffepy.utils.installation import MissingExtraError

_VERSIONS = (
    ("Open MPI", re.compile(r"\(Open MPI\) (\d[\w.]*)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (\d[\w.]*)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\d[\w.]*)")),
)
"""What `mpirun --version` prints; MVAPICH starts its processes with MPICH's Hydra."""
_EXPORTED = re.compile(r"(NCCL|CUDA|OMP|NUMBA|UCX|CAFFEPY)_\w+|PYTHONPATH|PYTHONUNBUFFERED|LD_LIBRARY_PATH")
"""Variables of the environment that processes on other hosts need too."""
_SECONDS = 20.0
"""How long a launcher may take to say its version."""


@dataclass(frozen=True)
class Mpirun:
    """An installed launcher.

    Args:
        path: the program.
        kind: ``Open MPI``, ``MPICH`` or ``Intel MPI``.
        version: its version, e.g. ``5.0.11``.
    """

    path: Path
    kind: str
    version: str

    @property
    def major(self) -> int:
        """The version's first number."""
        return int(re.split(r"\D", self.version)[0])


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Args:
        program: the command line of each process.
        per_node: processes a host.
        nodes: how many hosts.
        hosts: their names; empty: this machine, or the hosts of a batch system.
        oversubscribe: start more processes than a host has cores or slots.
        exported: names of the variables that other hosts get.
        options: the launcher's own options, as they are.
    """

    program: Sequence[str]
    per_node: int
    nodes: int = 1
    hosts: Sequence[str] = ()
    oversubscribe: bool = False
    exported: Sequence[str] = ()
    options: Sequence[str] = field(default=())

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.per_node * self.nodes


def find_mpirun(wanted: str | None = None) -> Mpirun:
    """The launcher `wanted`, else the one beside this Python, else one on the PATH.

    Raises:
        MissingExtraError: there is none.
        ConfigError: `wanted` is not there, or it is none that is known.
    """
    path = shutil.which(wanted) if wanted else _installed()
    if path is None and wanted:
        raise ConfigError(f"--mpirun {wanted}: there is no such program")
    if path is None:
        raise MissingExtraError("mpirun", "mpi", "to start several processes")
    absolute = Path(path).absolute()  # Open MPI takes its own place on other hosts from how it was called
    return identify(absolute, ask([str(absolute), "--version"]))


def _installed() -> str | None:
    beside = str(Path(sys.executable).parent)
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=beside) or shutil.which(name):
            return found
    return None


def identify(path: Path, answer: str) -> Mpirun:
    """The launcher that answered to `--version`.

    Raises:
        ConfigError: it is none that is known.
    """
    for kind, pattern in _VERSIONS:
        if match := pattern.search(answer):
            return Mpirun(path, kind, match[1])
    said = answer.strip().split("\n")[0] or "nothing"
    raise ConfigError(
        f"{path} --version says '{said}', which is neither Open MPI, MPICH nor Intel MPI: name another with --mpirun, "
        "or start the processes yourself"
    )


def ask(command: Sequence[str]) -> str:
    """All that a program prints; nothing if it cannot be run."""
    environment = {**os.environ, "PATH": search_path(Path(command[0]))}
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return answer.stdout + answer.stderr


def search_path(program: Path) -> str:
    """The PATH with a launcher's own folder first: Intel's looks for its parts there."""
    return os.pathsep.join((str(program.parent), os.environ.get("PATH", os.defpath)))


def exported_names(environment: Mapping[str, str], more: Sequence[str] = ()) -> list[str]:
    """The variables that other hosts need too, with `more` that were asked for.

    Raises:
        ConfigError: one that was asked for is not set.
    """
    for name in more:
        if name not in environment:
            raise ConfigError(f"--export {name}: this variable is not set")
    return sorted({*(name for name in environment if _EXPORTED.fullmatch(name)), *more})


def mpirun_line(mpirun: Mpirun, job: Job) -> list[str]:
    """The command line that starts a job with an MPI's own launcher."""
    lines = {"Open MPI": _open_mpi, "MPICH": _mpich, "Intel MPI": _intel}
    return [str(mpirun.path), "-np", str(job.size), *lines[mpirun.kind](mpirun, job), *job.options, *job.program]


def _open_mpi(mpirun: Mpirun, job: Job) -> list[str]:
    modifier = ":OVERSUBSCRIBE" if job.oversubscribe and mpirun.major >= 5 else ""
    line = ["--map-by", f"ppr:{job.per_node}:node{modifier}", "--bind-to", "none"]
    if job.oversubscribe and not modifier:
        line.append("--oversubscribe")
    if job.hosts:
        line += ["--host", ",".join(f"{host}:{job.per_node}" for host in job.hosts)]
    for name in job.exported:
        line += ["-x", name]
    return line


def _mpich(mpirun: Mpirun, job: Job) -> list[str]:
    """Hydra hands the whole environment on, and never counts cores."""
    hosts = ["-hosts", ",".join(f"{host}:{job.per_node}" for host in job.hosts)] if job.hosts else []
    return ["-ppn", str(job.per_node), *hosts, "-bind-to", "none", "-genvall"]


def _intel(mpirun: Mpirun, job: Job) -> list[str]:
    hosts = ["-hosts", ",".join(job.hosts)] if job.hosts else []
    return ["-ppn", str(job.per_node), *hosts, "-genvall", "-genv", "I_MPI_PIN", "off"]
