"""`caffepy launch`: run a command in several processes, with MPI, with Slurm or without either."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.cli.options import Command, normalise
from caffepy.errors import CaffepyError, ConfigError
from caffepy.utils.installation import MissingExtraError
from caffepy.utils.options import argument, name_list, natural, option, positive, switch

if TYPE_CHECKING:
    from caffepy.cli.train import TrainCommand
    from caffepy.distributed.launch.launchers import Allocation, Host, Job, Mpirun, Rendezvous
    from caffepy.distributed.launch.run import LaunchPlan

logger = logging.getLogger(__name__)

_RANK_VARIABLES = {"Open MPI": "OMPI_COMM_WORLD_RANK", "MPICH": "PMI_RANK", "Intel MPI": "PMI_RANK"}
"""The environment variable of the rank, by MPI implementation."""
_MPI_OPTIONS = ("hosts", "hostfile", "nodes", "mpirun", "min_nodes")
"""Options that are for MPI alone."""
_RESTART = "restart after the loss of a rank or host"
_RENDEZVOUS = "without MPI: run on each machine; sets RANK, WORLD_SIZE, … as torchrun does"


@dataclass(kw_only=True)
class LaunchCommand(Command):
    """Start a command in several processes.

    Print the command line that starts a command in several processes, run it and wait for its end.

      caffepy launch --nproc-per-node 4 -- train --solver solver.prototxt
      caffepy launch --nproc-per-node 8 --hostfile hosts -- train --solver solver.prototxt
      caffepy launch --nproc-per-node 2 --hosts a,b --dry-run -- script.py --its-option
      caffepy launch --nproc-per-node 8 --restarts 3 --hostfile hosts --min-nodes 2 -- train --solver solver.prototxt
      caffepy launch --nnodes 2 --node-rank 1 --master-addr a --nproc-per-node 8 -- train --solver solver.prototxt

    The command is a caffepy command, a Python script or another program. Within a Slurm allocation srun starts it, or
    the installed MPI's mpirun if srun cannot start that MPI.
    """

    nproc_per_node: int | None = option(
        "processes per host (default: the hostfile's slots, the tasks of Slurm's allocation, or 1)", positive
    )
    nodes: int | None = option("number of hosts (default: all given hosts)", positive)
    hostfile: Path | None = option("hosts, one per line: a, 'a slots=4' or a:4", Path, excludes="hostfile")
    hosts: list[str] | None = option("hosts, separated by commas (default: this one)", name_list, excludes="hostfile")
    oversubscribe: bool = switch("allow more processes than cores or slots")
    export: list[str] = option("further variables to pass to other hosts", name_list, default=[])
    mpirun: str | None = option("the launcher (default: beside this Python, else on PATH)", metavar="PROGRAM")
    mpirun_options: list[str] = option("options passed to the launcher unchanged", shlex.split, "TEXT", default=[])
    dry_run: bool = switch("print the command line without running it")
    restarts: int = option(
        "restart up to N times; training resumes from the newest valid snapshot (0)", natural, default=0, group=_RESTART
    )
    min_nodes: int | None = option("continue with at least N hosts (default: all hosts)", positive, group=_RESTART)
    nnodes: int | None = option("number of machines", positive, group=_RENDEZVOUS)
    node_rank: int | None = option("index of this machine, from 0", natural, group=_RENDEZVOUS)
    master_addr: str | None = option("the machine of rank 0 (default: this one)", metavar="HOST", group=_RENDEZVOUS)
    master_port: int | None = option("rank 0's port (default: 29500, or a free one)", positive, group=_RENDEZVOUS)
    program: list[str] = argument("the command to start", metavar="-- COMMAND", nargs="...")

    def run(self) -> int:
        """Print the launcher's command line, run it and wait for its end.

        Raises:
            ConfigError: the options conflict, the hostfile cannot be read, or the command is missing.
            MissingExtraError: no launcher is installed.
        """
        from caffepy.distributed.launch.run import LaunchedJob

        start = make_start(self)
        lines = [
            shlex.join([*(f"{name}={value}" for name, value in more.items()), *line])
            for line, more in start.commands(start.job)
        ]
        if self.dry_run:
            print("\n".join(lines), flush=True)
            return 0
        for line in lines:
            logger.info("%s", line)
        start = replace(start, typed=shlex.join(["caffepy", *_before_program(self)]))
        return LaunchedJob(start, self.restarts, self.min_nodes).run()


def _before_program(args: LaunchCommand) -> list[str]:
    """Return the launcher's part of the command line, including ``--``."""
    before = args.arguments[: len(args.arguments) - len(args.program)]
    return [*before, "--"] if before[-1] != "--" else before


def make_start(args: LaunchCommand) -> LaunchPlan:
    """Return the `LaunchPlan` of the job.

    Raises:
        ConfigError, MissingExtraError: as in `run`.
    """
    from caffepy.distributed.launch.launchers import Rendezvous, find_allocation
    from caffepy.distributed.processes.launcher import find_mpi_launcher

    launcher = find_mpi_launcher()
    terminal = "SLURM_PTY_PORT" in os.environ  # a shell opened by `srun --pty`
    if launcher is not None and launcher.size != 1 and not terminal:
        raise ConfigError(f"{launcher.name} has started this process; caffepy launch starts all of them: call it once")
    rendezvous = _rendezvous(args)
    if rendezvous is not None:
        return _without_mpi(args, rendezvous)
    allocation = find_allocation()
    if allocation is None and "SLURM_JOB_ID" in os.environ:
        _say("srun is not installed; Slurm's allocation is ignored")
    if allocation is None and _is_for_torch(args):
        _say("the script takes its local rank from torch.distributed's launcher: it is started without MPI")
        return _without_mpi(args, Rendezvous())
    job = make_job(args, allocation)
    if allocation is None:
        return _with_mpirun(args, job)
    return _within_slurm(args, job, allocation)


def _with_mpirun(args: LaunchCommand, job: Job) -> LaunchPlan:
    from caffepy.distributed.launch.launchers import Rendezvous, find_mpirun

    try:
        return _mpirun_start(args, job, find_mpirun(args.mpirun))
    except MissingExtraError:
        if job.nodes > 1 or job.hosts:
            raise
        _say("no mpirun is installed: the processes are started without MPI")
        return _without_mpi(args, Rendezvous())


def _mpirun_start(args: LaunchCommand, job: Job, mpirun: Mpirun, variables: dict[str, str] | None = None) -> LaunchPlan:
    from caffepy.distributed.launch.launchers import mpirun_line

    return _start(args, job, _RANK_VARIABLES[mpirun.kind], mpirun.path, lambda job: mpirun_line(mpirun, job), variables)


def _start(
    args: LaunchCommand,
    job: Job,
    variable: str,
    program: Path,
    line: Callable[[Job], list[str]],
    variables: dict[str, str] | None = None,
) -> LaunchPlan:
    """Return the `LaunchPlan` of a job by a launcher."""
    from caffepy.distributed.launch.launchers import search_path, without_slurm
    from caffepy.distributed.launch.run import LaunchPlan, environment_of

    inherited = os.environ if shutil.which("srun") else without_slurm()
    environment = environment_of({"PATH": search_path(program)}, inherited)
    return LaunchPlan(job, lambda job: [(line(job), variables or {})], environment, variable, **_training(args))


def _within_slurm(args: LaunchCommand, job: Job, allocation: Allocation) -> LaunchPlan:
    from caffepy.distributed.launch.launchers import find_mpirun, host_names, srun_line

    # The current step holds the allocation's CPUs; without this, a nested step would wait forever.
    variables = {"SLURM_OVERLAP": "1"} if allocation.within_step else {}
    if args.min_nodes is not None and not job.hosts:
        job = replace(job, hosts=host_names()[: job.nodes])
    if args.mpirun is not None:
        return _mpirun_start(args, allocation.allow(job), find_mpirun(args.mpirun), variables)
    allocation.check(job)
    mpirun, plugin = _slurm_way(job)
    if mpirun is not None:
        return _mpirun_start(args, allocation.allow(job), mpirun, variables)
    srun = shutil.which("srun") or "srun"
    return _start(
        args, job, "SLURM_PROCID", Path(srun), lambda job: srun_line(srun, job, plugin, allocation), variables
    )


def _is_for_torch(args: LaunchCommand) -> bool:
    """Return whether a script asks for its local rank as under torch.distributed's launchers, and no option for MPI."""
    from caffepy.distributed.launch.launchers import local_rank_name

    given = any(getattr(args, name) for name in (*_MPI_OPTIONS, "mpirun_options"))
    return not given and not _batch_system() and local_rank_name(_program(args.program)) is not None


def _without_mpi(args: LaunchCommand, rendezvous: Rendezvous) -> LaunchPlan:
    """Return the `LaunchPlan` of this machine's processes without a launcher."""
    import signal

    from caffepy.distributed.launch.launchers import (
        RANK,
        Job,
        local_commands,
        local_rank_name,
        secret_for,
        without_slurm,
    )
    from caffepy.distributed.launch.run import LaunchPlan, environment_of

    rendezvous = rendezvous.complete()
    job = Job(_program(args.program), args.nproc_per_node or 1)
    name = local_rank_name(job.program) or ""
    option = name if name.startswith("-") else None
    return LaunchPlan(
        job,
        lambda job: local_commands(job, rendezvous, option),
        environment_of(secret_for(rendezvous), without_slurm()),  # a step's variables would make each rank task 0
        RANK,
        last_signal=signal.SIGKILL,
        **_training(args),
    )


def _rendezvous(args: LaunchCommand) -> Rendezvous | None:
    """Return the rendezvous of ranks without MPI; None: use MPI."""
    from caffepy.distributed.launch.launchers import Rendezvous

    given = {"--node-rank": args.node_rank, "--master-addr": args.master_addr, "--master-port": args.master_port}
    if args.nnodes is None and all(value is None for value in given.values()):
        return None
    for name in _MPI_OPTIONS:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for MPI; without MPI run caffepy launch on each machine, with --nnodes")
    return Rendezvous(args.nnodes or 1, args.node_rank or 0, args.master_addr, args.master_port)


def _training(args: LaunchCommand) -> dict[str, Any]:
    """Return the training fields of `LaunchPlan`; empty if the job is no caffepy training."""
    from caffepy.cli.main import parse
    from caffepy.cli.train import TrainCommand

    words = normalise(args.program[1:] if args.program[:1] == ["--"] else args.program)
    if words[:1] != ["train"]:
        return {}
    try:
        train = parse(words)
    except CaffepyError:  # the ranks report it
        return {"shares_signals": True}
    assert isinstance(train, TrainCommand)
    return {
        "shares_signals": True,
        "interrupt_stops": train.sigint_effect == "stop",
        "terminate_stops": train.sigterm_effect == "stop",
        "passes": 1 if args.min_nodes is None else _passes(train),
    }


def _passes(train: TrainCommand) -> int:
    """Return the solver's iter_size; 1 if the file cannot be read here."""
    from caffepy.formats.proto.schemas import register_proto

    try:
        if train.proto is not None:
            register_proto(train.proto)
        from caffepy.formats.assign import assign
        from caffepy.formats.ignore import ignoring
        from caffepy.formats.load import read_solver
        from caffepy.formats.paths import PathResolver

        if train.solver is None:
            return 1
        with nullcontext() if train.ignore_fields is None else ignoring(train.ignore_fields):
            param = read_solver(train.solver)
        assign(param, [text for text in train.set if text.startswith("iter_size")], PathResolver(train.solver))
        return int(param.iter_size)
    except CaffepyError:
        return 1


def _slurm_way(job: Job) -> tuple[Mpirun | None, str | None]:
    """Return the MPI's own launcher if srun cannot start this MPI (logged), else srun's ``--mpi`` plugin."""
    from caffepy.distributed.launch.launchers import PLUGINS, find_mpirun, refusal

    if any(option.startswith("--mpi") for option in job.options):
        return None, None
    try:
        mpirun = find_mpirun()
    except CaffepyError:  # a Slurm site's MPI may come without mpirun
        return None, None
    plugin = PLUGINS[mpirun.kind]
    reason = refusal(shutil.which("srun") or "srun", plugin)
    if reason is None:
        return None, plugin
    _say(
        f"srun cannot start {mpirun.kind} {mpirun.version} with --mpi={plugin} here ({reason}): its own "
        f"{mpirun.path.name} starts the processes"
    )
    return mpirun, None


def _say(text: str) -> None:
    print(f"caffepy: {text}", file=sys.stderr, flush=True)


def make_job(args: LaunchCommand, allocation: Allocation | None) -> Job:
    """Return the checked job.

    Raises:
        ConfigError: the job cannot be started.
    """
    from caffepy.distributed.launch.launchers import Job, exported_names, parse_hosts, read_hostfile

    hosts = read_hostfile(args.hostfile) if args.hostfile else parse_hosts(args.hosts or [])
    if args.nodes is not None and hosts:
        if args.nodes > len(hosts):
            raise ConfigError(f"--nodes {args.nodes}: only {len(hosts)} hosts are named; name more, or lower --nodes")
        hosts = hosts[: args.nodes]
    nodes = len(hosts) or args.nodes or (allocation.nodes if allocation else 1)
    if nodes > 1 and not hosts and not allocation and not _batch_system():
        raise ConfigError(f"--nodes {nodes}: name the hosts with --hosts or --hostfile")
    per_node = args.nproc_per_node or _slots(hosts) or (allocation.tasks_per_node() if allocation else 1)
    if not args.oversubscribe:
        _check_slots(hosts, per_node)
    others = bool(hosts) or nodes > 1
    return Job(
        program=_program(args.program),
        per_node=per_node,
        nodes=nodes,
        hosts=[host.name for host in hosts],
        oversubscribe=args.oversubscribe,
        exported=exported_names(os.environ, args.export) if others else [],
        options=args.mpirun_options,
    )


def _batch_system() -> bool:
    """Return whether a batch system has allocated hosts, which mpirun queries."""
    return any(name in os.environ for name in ("PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE"))


def _slots(hosts: Sequence[Host]) -> int | None:
    """Return the processes per host that the hostfile gives."""
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        first, other = hosts[0], next(host for host in hosts if host.slots != hosts[0].slots)
        raise ConfigError(
            f"hosts have different numbers of slots ({first.name} {first.slots}, {other.name} {other.slots}): give "
            "the processes per host with --nproc-per-node"
        )
    return counts.pop() if counts else None


def _check_slots(hosts: Sequence[Host], per_node: int) -> None:
    for host in hosts:
        if host.slots is not None and host.slots < per_node:
            raise ConfigError(
                f"host {host.name} has {host.slots} slots for {per_node} processes: lower --nproc-per-node, or allow "
                "it with --oversubscribe"
            )


def _program(words: Sequence[str]) -> list[str]:
    """Return the command line of each process."""
    from caffepy.cli.main import COMMANDS
    from caffepy.utils.registry import suggest

    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise ConfigError("launch needs a command: caffepy launch --nproc-per-node 4 -- train --solver solver.prototxt")
    if words[0] in COMMANDS:
        return [sys.executable, "-m", "caffepy", *words]
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise ConfigError(f"there is no script {words[0]}")
        return [sys.executable, *words]
    if shutil.which(words[0]) is None:
        known = suggest(words[0], list(COMMANDS))
        raise ConfigError(f"'{words[0]}' is neither a caffepy command nor a program; {known}")
    return words
