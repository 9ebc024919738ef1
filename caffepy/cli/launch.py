"""`caffepy launch`: start a command in several processes, with the MPI that is installed or with Slurm."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, name_list, positive
from caffepy.errors import CaffepyError, ConfigError

if TYPE_CHECKING:
    from caffepy.parallel.launch.hostfile import Host
    from caffepy.parallel.launch.mpirun import Job
    from caffepy.parallel.launch.slurm import Allocation

_DESCRIPTION = """\
Write the line that starts a command in several processes, print it and run it.

  caffepy launch --nproc-per-node 4 -- train --solver solver.prototxt
  caffepy launch --nproc-per-node 8 --hostfile hosts -- train --solver solver.prototxt
  caffepy launch --nproc-per-node 2 --hosts a,b --dry-run -- script.py --its-option

The command is one of caffepy's, a Python script, or another program. Within an allocation of Slurm's
srun starts it, or where srun cannot start the MPI that is installed, that MPI's mpirun."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("launch", help="start a command in several processes", description=_DESCRIPTION)
    parser.add_argument(
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="processes a host (default: the hostfile's slots, the tasks of Slurm's allocation, or 1)",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="how many hosts (default: all that are given)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, one a line: a, 'a slots=4' or a:4")
    where.add_argument("--hosts", type=name_list, metavar="LIST", help="hosts, with commas (default: this one)")
    parser.add_argument("--oversubscribe", action="store_true", help="more processes than a host has cores or slots")
    parser.add_argument(
        "--export", type=name_list, default=[], metavar="LIST", help="more variables for other hosts to get"
    )
    parser.add_argument("--mpirun", metavar="PROGRAM", help="the launcher (default: beside this Python, else on PATH)")
    parser.add_argument(
        "--mpirun-options", type=shlex.split, default=[], metavar="TEXT", help="options for the launcher, as they are"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the line and leave it at that")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to start")


def run(args: argparse.Namespace) -> int:
    """Print the launcher's line and become the launcher.

    Raises:
        ConfigError: options that do not go together, a hostfile that cannot be read, no command.
        MissingExtraError: no launcher is installed.
    """
    line, variables = launch_line(args)
    shown = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *line])
    print(shown, file=sys.stdout if args.dry_run else sys.stderr, flush=True)
    if args.dry_run:
        return 0
    from caffepy.parallel.launch.mpirun import search_path
    from caffepy.parallel.launch.slurm import without_slurm

    inherited = os.environ if shutil.which("srun") else without_slurm()
    try:
        os.execve(line[0], line, {**inherited, **variables, "PATH": search_path(Path(line[0]))})
    except OSError as error:
        raise ConfigError(f"{line[0]} cannot be started: {error.strerror}") from error


def launch_line(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """What to run, and variables that it needs.

    Raises:
        ConfigError, MissingExtraError: as `run`.
    """
    from caffepy.parallel.launch.mpirun import find_mpirun, mpirun_line
    from caffepy.parallel.launch.slurm import find_allocation
    from caffepy.parallel.processes.launcher import find_launcher

    launcher = find_launcher()
    terminal = "SLURM_PTY_PORT" in os.environ  # a shell that `srun --pty` opened, whatever tasks it was asked for
    if launcher is not None and launcher.size != 1 and not terminal:
        raise ConfigError(f"{launcher.name} has started this process; caffepy launch starts all of them: call it once")
    allocation = find_allocation()
    if allocation is None and "SLURM_JOB_ID" in os.environ:
        _say("there is no srun here, so Slurm's allocation is left out of account")
    job = make_job(args, allocation)
    if allocation is None:
        return mpirun_line(find_mpirun(args.mpirun), job), {}
    # the step that this process belongs to holds the allocation's CPUs: without this a step in it waits for ever
    variables = {"SLURM_OVERLAP": "1"} if allocation.within_step else {}
    if args.mpirun is None:
        allocation.check(job)
        return _slurm_line(job, allocation), variables
    return mpirun_line(find_mpirun(args.mpirun), allocation.allow(job)), variables


def _slurm_line(job: Job, allocation: Allocation) -> list[str]:
    """The line with srun, or with the MPI's own launcher where srun cannot start this MPI; says why."""
    from caffepy.parallel.launch.mpirun import find_mpirun, mpirun_line
    from caffepy.parallel.launch.slurm import PLUGINS, refusal, srun_line

    srun = shutil.which("srun") or "srun"
    if any(option.startswith("--mpi") for option in job.options):
        return srun_line(srun, job, None, allocation)
    try:
        mpirun = find_mpirun()
    except CaffepyError:  # a site's MPI may have no mpirun, because srun is the way there
        return srun_line(srun, job, None, allocation)
    plugin = PLUGINS[mpirun.kind]
    reason = refusal(srun, plugin)
    if reason is None:
        return srun_line(srun, job, plugin, allocation)
    _say(
        f"srun cannot start {mpirun.kind} {mpirun.version} with --mpi={plugin} here ({reason}): its own "
        f"{mpirun.path.name} starts the processes"
    )
    return mpirun_line(mpirun, allocation.allow(job))


def _say(text: str) -> None:
    print(f"caffepy: {text}", file=sys.stderr, flush=True)


def make_job(args: argparse.Namespace, allocation: Allocation | None) -> Job:
    """What is to be started, checked.

    Args:
        args: the command line.
        allocation: Slurm's, which says how many hosts there are.

    Raises:
        ConfigError: it cannot be started so.
    """
    from caffepy.parallel.launch.hostfile import parse_hosts, read_hostfile
    from caffepy.parallel.launch.mpirun import Job, exported_names

    hosts = read_hostfile(args.hostfile) if args.hostfile else parse_hosts(args.hosts or [])
    if args.nodes is not None and hosts:
        if args.nodes > len(hosts):
            raise ConfigError(f"--nodes {args.nodes}: only {len(hosts)} hosts are named; name more, or take fewer")
        hosts = hosts[: args.nodes]
    nodes = len(hosts) or args.nodes or (allocation.nodes if allocation else 1)
    if nodes > 1 and not hosts and not allocation and not _batch_system():
        raise ConfigError(f"--nodes {nodes}: which hosts? Name them with --hosts or --hostfile")
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
    """Whether a batch system gave hosts, which mpirun asks it for."""
    return any(name in os.environ for name in ("PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE"))


def _slots(hosts: Sequence[Host]) -> int | None:
    """Processes a host where the hostfile alone says how many."""
    counts = {host.slots for host in hosts}
    if len(counts) > 1:
        first, other = hosts[0], next(host for host in hosts if host.slots != hosts[0].slots)
        raise ConfigError(
            f"hosts have different numbers of slots ({first.name} {first.slots}, {other.name} {other.slots}): say with "
            "--nproc-per-node how many processes each of them gets"
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
    """The command line of each process.

    Raises:
        ConfigError: there is none, or it cannot be found.
    """
    from caffepy.cli.main import COMMANDS
    from caffepy.registry import suggest

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
        raise ConfigError(f"'{words[0]}' is neither a command of caffepy's nor a program; {known}")
    return words
