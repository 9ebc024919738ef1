"""Slurm: what an allocation holds, and whether and how srun starts an MPI's processes within it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

from caffepy.distributed.launch.mpirun import Job, ask
from caffepy.errors import ConfigError

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
    """``(4, 4, 2)`` for Slurm's ``4(x2),2``.

    Raises:
        ConfigError: it is no such list, or speaks of more hosts than there can be.
    """
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
    """A count of Slurm's.

    Raises:
        ConfigError: it is none.
    """
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
