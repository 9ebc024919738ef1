"""How a job's processes are started: hostfiles, command lines of mpirun and srun, and ranks of a machine without MPI.

Hosts are read from hostfiles of Open MPI, MPICH and Intel MPI, and from lists of names. This module finds the installed
launcher and writes its command line: Open MPI, MPICH and Intel MPI each have their own options. Under Slurm it reads
what an allocation holds, and finds out whether and how srun starts an MPI's processes within it. Without MPI it gives
each process of this machine the variables that torchrun and Kubernetes' operators set.

Cores are never bound: every process takes its own (`placement.py`), and each thread those near its GPU.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from caffepy.distributed.processes.launcher import LOOPBACK, SECRET
from caffepy.errors import ConfigError
from caffepy.utils.files import read_regular
from caffepy.utils.installation import MissingExtraError

# -- hosts ---------------------------------------------------------------------------------------------

_NAME = r"(?P<name>[\w.@][\w.@-]*)"
_SLOTS = r"(?:\s*:\s*(?P<count>[0-9]+)|\s+slots\s*=\s*(?P<slots>[0-9]+))?"
_LINE = re.compile(rf"{_NAME}{_SLOTS}(?:\s+max[-_]slots\s*=\s*[0-9]+)?")
MAX_SLOTS = 2**20
"""Processes that a host may be said to have."""
MAX_BYTES = 2**24
"""Of a hostfile."""


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: how it is reached.
        slots: how many processes may run there; None where it is not given.
    """

    name: str
    slots: int | None = None


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file: a line each, ``host``, ``host slots=4`` (Open MPI) or ``host:4`` (MPICH); ``#`` comments.

    A host that is named again has the slots of all its lines; a line without a number is one slot then, as in the
    files of PBS.

    Raises:
        ConfigError: it cannot be read, a line means nothing, or there is no host in it.
    """
    try:
        lines = read_regular(path, MAX_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--hostfile {path}: cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if text:
            found.append(_parse(text, f"{path}:{number}"))
    if not found:
        raise ConfigError(f"--hostfile {path}: names no host; write one a line: host, 'host slots=4' or host:4")
    return _together(found)


def parse_hosts(names: Sequence[str]) -> list[Host]:
    """The hosts of a list such as ``["a", "b:4"]``.

    Raises:
        ConfigError: an entry means nothing.
    """
    return _together([_parse(name, "--hosts") for name in names])


def _parse(text: str, where: str) -> Host:
    match = _LINE.fullmatch(text)
    if text.startswith("-"):
        raise ConfigError(f"{where}: '{text}' begins with a dash, so a launcher would take it for an option of its own")
    if match is None:
        raise ConfigError(f"{where}: '{text}' is no host; write host, 'host slots=4' or host:4")
    slots = match["count"] or match["slots"]
    if slots is not None and (len(slots) > 9 or int(slots) > MAX_SLOTS):
        raise ConfigError(f"{where}: host '{match['name']}' has {slots} slots; at most {MAX_SLOTS} are possible")
    if slots is not None and int(slots) == 0:
        raise ConfigError(f"{where}: host '{match['name']}' has 0 slots; leave it out")
    return Host(match["name"], int(slots) if slots else None)


def _together(found: Sequence[Host]) -> list[Host]:
    """Each host once, in the order of their first lines."""
    hosts: dict[str, Host] = {}
    for host in found:
        if before := hosts.get(host.name):
            host = Host(host.name, (before.slots or 1) + (host.slots or 1))
        hosts[host.name] = host
    return list(hosts.values())


# -- mpirun --------------------------------------------------------------------------------------------

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
    """The processes to start.

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
    # Open MPI binds each process to a core, where solver and NCCL threads would take turns; caffepy places them itself.
    line = ["--map-by", f"ppr:{job.per_node}:node{modifier}", "--bind-to", "none"]
    if job.oversubscribe and not modifier:
        line.append("--oversubscribe")
    if job.hosts:
        line += ["--host", ",".join(f"{host}:{job.per_node}" for host in job.hosts)]
    # Only Open MPI needs the names; the others hand the whole environment on.
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


# -- ranks without MPI ---------------------------------------------------------------------------------

RANK = "RANK"
_PORT = 29500
"""torchrun's."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks join rank 0.

    Args:
        nodes: how many machines call `caffepy launch`.
        node_rank: the number of this one among them.
        address: rank 0's machine; None: this one, where there is no other.
        port: of rank 0; None: a free one, or 29500 where there are several machines.
    """

    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None

    def complete(self) -> Rendezvous:
        """The same with address and port.

        Raises:
            ConfigError: no such node, several nodes without an address, a port that is none.
        """
        if not 0 <= self.node_rank < self.nodes:
            raise ConfigError(f"--node-rank {self.node_rank}: with --nnodes {self.nodes} it is 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.address is None:
            raise ConfigError(f"--nnodes {self.nodes}: where is rank 0? Say it with --master-addr, alike on all nodes")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise ConfigError(f"--master-port {self.port} is no port: take one from 1 to 65535")
        port = self.port or (_PORT if self.nodes > 1 else _free_port())
        return replace(self, address=self.address or LOOPBACK, port=port)


def local_rank_name(program: Sequence[str]) -> str | None:
    """How a Python script asks for its local rank, if it is written for torch.distributed's launchers.

    Returns:
        ``LOCAL_RANK``, torchrun's variable; ``--local_rank`` or ``--local-rank``, which torch.distributed.launch
        passes to a script; None: the program is no script, or asks for neither.
    """
    script = next((word for word in program[1:2] if word.endswith(".py")), None)
    try:
        text = "" if script is None else Path(script).read_text(errors="replace")
    except OSError:  # the ranks report it
        return None
    found = re.findall(r"""["'](--local[_-]rank|LOCAL_RANK)["']""", text)
    return max(found, key=lambda name: name.startswith("-"), default=None)


def local_commands(
    job: Job, rendezvous: Rendezvous, option: str | None = None
) -> list[tuple[Sequence[str], dict[str, str]]]:
    """The command line of each process of this machine, and its variables.

    Args:
        job: the program; Python and a script, if there is an option.
        rendezvous: complete.
        option: passes the local rank to the script.
    """
    shared = {
        "WORLD_SIZE": str(rendezvous.nodes * job.per_node),
        "LOCAL_WORLD_SIZE": str(job.per_node),
        "MASTER_ADDR": str(rendezvous.address),
        "MASTER_PORT": str(rendezvous.port),
    }
    first = rendezvous.node_rank * job.per_node
    commands: list[tuple[Sequence[str], dict[str, str]]] = []
    for local in range(job.per_node):
        told = [] if option is None else [f"{option}={local}"]
        variables = {RANK: str(first + local), "LOCAL_RANK": str(local), **shared}
        commands.append(([*job.program[:2], *told, *job.program[2:]], variables))
    return commands


def secret_for(rendezvous: Rendezvous, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable with a new secret, where this machine is the only one and the environment has none; else nothing."""
    made = rendezvous.nodes == 1 and SECRET not in environment
    return {SECRET: secrets.token_hex()} if made else {}


def _free_port() -> int:
    with socket.socket() as probe:
        # Another process may take the port before rank 0 listens there. That is rare, and an error that names the port.
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


# -- Slurm ---------------------------------------------------------------------------------------------

PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel MPI": "pmi2"}
"""The srun ``--mpi`` by which each library learns its ranks."""
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
MAX_NODES = 2**20
"""Hosts that an allocation may have; of tasks and CPUs a host can have as many."""
_REFUSED = re.compile(r"invalid MPI type", re.IGNORECASE)
_PREFIX = re.compile(r"^srun: (?:error|fatal):\s*")


@dataclass(frozen=True)
class Allocation:
    """The hosts that Slurm has given.

    Args:
        nodes: how many.
        tasks: how many tasks each of them was asked for; empty without such a request.
        cores: how many CPUs each of them gives; empty where Slurm does not say.
        cores_per_task: CPUs that a task was asked for; None without such a request.
        overcommit: the job may have more tasks than CPUs.
        within_step: srun started this process, so its CPUs are taken.
    """

    nodes: int
    tasks: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    cores_per_task: int | None = None
    overcommit: bool = False
    within_step: bool = False

    def tasks_per_node(self) -> int:
        """Tasks per host that the allocation was asked for; 1 where it was asked for none.

        Raises:
            ConfigError: the hosts have different numbers.
        """
        if len(set(self.tasks)) > 1:
            counts = ",".join(map(str, self.tasks))
            raise ConfigError(
                f"the allocation's {sum(self.tasks)} tasks lie unevenly on its hosts ({counts}): say with "
                "--nproc-per-node how many processes each of them gets, or allocate with --ntasks-per-node"
            )
        return self.tasks[0] if self.tasks else 1

    def check(self, job: Job) -> None:
        """Refuse what srun would.

        Raises:
            ConfigError: too many hosts, or more processes than CPUs.
        """
        if job.nodes > self.nodes:
            raise ConfigError(f"{job.nodes} hosts: the allocation has {self.nodes}; take fewer, or allocate more")
        most = max(self.cores, default=job.per_node)
        if most < job.per_node and not (job.oversubscribe or self.overcommit):
            cores = "1 CPU" if most == 1 else f"{most} CPUs"
            raise ConfigError(
                f"the allocation has {cores} a host for {job.per_node} processes: lower --nproc-per-node, allocate "
                "more with --cpus-per-task or --ntasks-per-node, or allow it with --oversubscribe"
            )

    def allow(self, job: Job) -> Job:
        """The same job for an MPI's own launcher, which takes Slurm's tasks for all that a host can hold."""
        enough = self.tasks and min(self.tasks) >= job.per_node
        return job if enough else replace(job, oversubscribe=True)

    def cores_of(self, job: Job) -> int | None:
        """CPUs of each process: what a task was asked for, or less where there are more processes than tasks."""
        if self.cores_per_task is None or not self.cores:
            return self.cores_per_task
        return max(1, min(self.cores_per_task, min(self.cores) // job.per_node))


def find_allocation(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation that this process runs in, or None: outside of one, or in a container that has no srun.

    Raises:
        ConfigError: Slurm's variables make no sense.
    """
    if "SLURM_JOB_ID" not in environment or shutil.which("srun", path=environment.get("PATH")) is None:
        return None
    tasks = environment.get("SLURM_NTASKS_PER_NODE", "")
    if not tasks and "SLURM_NTASKS" in environment:  # else it is a number of Slurm's own: a whole host's CPUs
        tasks = environment.get("SLURM_TASKS_PER_NODE", "")
    cores = environment.get("SLURM_CPUS_PER_TASK", "")
    return Allocation(
        nodes=_number(environment.get("SLURM_JOB_NUM_NODES", "1"), "SLURM_JOB_NUM_NODES"),
        tasks=_expand(tasks, "SLURM_TASKS_PER_NODE"),
        cores=_expand(environment.get("SLURM_JOB_CPUS_PER_NODE", ""), "SLURM_JOB_CPUS_PER_NODE"),
        cores_per_task=_number(cores, "SLURM_CPUS_PER_TASK") if cores else None,
        overcommit="SLURM_OVERCOMMIT" in environment,
        within_step="SLURM_STEP_ID" in environment,
    )


def _expand(text: str, variable: str) -> tuple[int, ...]:
    """``(4, 4, 2)`` for Slurm's ``4(x2),2``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = _REPEATED.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{variable}={text}: is no list such as 4(x2),2; unset it")
        repeats = _number(found[2] or "1", variable)
        if len(counts) + repeats > MAX_NODES:
            raise ConfigError(f"{variable}={text}: speaks of more than {MAX_NODES} hosts; unset it")
        counts += [_number(found[1], variable)] * repeats
    return tuple(counts)


def _number(text: str, variable: str) -> int:
    """A count of Slurm's."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_NODES:
        raise ConfigError(f"{variable}: '{text}' is not a number from 1 to {MAX_NODES}; unset it")
    return int(text)


def without_slurm(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment less Slurm's variables, by which an MPI's launcher would start its helpers with srun."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_")}


def srun_line(srun: str, job: Job, plugin: str | None, allocation: Allocation) -> list[str]:
    """The command line that starts a job within an allocation.

    Args:
        srun: the program.
        job: what to start.
        plugin: Slurm's way of telling an MPI its ranks; None: the site's own choice.
        allocation: where.
    """
    line = [srun, f"--nodes={job.nodes}", f"--ntasks={job.size}", f"--ntasks-per-node={job.per_node}"]
    # A rank that is killed must not leave the step running: the others would hold the allocation.
    line += ["--cpu-bind=none", "--kill-on-bad-exit=1"]
    if cores := allocation.cores_of(job):
        line.append(f"--cpus-per-task={cores}")  # since Slurm 22.05 a step does not take over what its job asked for
    if plugin:
        line.append(f"--mpi={plugin}")
    if job.hosts:
        line.append(f"--nodelist={','.join(job.hosts)}")
    if job.oversubscribe:
        line.append("--overcommit")
    return [*line, *job.options, *job.program]


def refusal(srun: str, plugin: str) -> str | None:
    """Why srun cannot use one of its ways to start an MPI, in its own words; None where it can.

    Slurm may name a way in ``srun --mpi=list`` that it cannot load, so it is tried: ``--test-only`` starts nothing.
    """
    answer = ask([srun, f"--mpi={plugin}", "--test-only", "true"])
    if not _REFUSED.search(answer):
        return None
    return _PREFIX.sub("", answer.strip().split("\n")[0])


def host_names() -> list[str]:
    """The names of the allocation's hosts; empty where Slurm does not say."""
    scontrol = shutil.which("scontrol")
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    return ask([scontrol, "show", "hostnames", nodes]).split() if scontrol and nodes else []
