"""A job from its first start to its end, restarts included, and signals to its processes on this and other machines.

The job is started again where a rank or host was lost, on the hosts that are left.

The processes of a job on this machine are found by a variable of their environment. A launcher's own ways with signals
differ, and most end the ranks before they can write a snapshot. So a signal goes to the ranks themselves; on other
machines this module, started there as a program by the same launcher, sends it:

    python -m caffepy.distributed.launch.run SIGNAL MARK VARIABLE (one | all | every)
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from caffepy.distributed.launch.launchers import Job
from caffepy.distributed.launch.supervisor import END_SECONDS, Command, ExitReport, Supervisor
from caffepy.errors import ConfigError
from caffepy.utils.options import whole

logger = logging.getLogger(__name__)


# -- the job's processes -------------------------------------------------------------------------------

MARK = "CAFFEPY_LAUNCH"
"""The variable that all processes of one `caffepy launch` have, with a value that no other job has."""
_SELF = "caffepy.distributed.launch.run"


@dataclass(frozen=True)
class Process:
    """A process of the job.

    Args:
        pid: its number.
        parent: its parent's.
        rank: what the launcher has told it; None: it is none that a launcher numbers, such as the launcher itself.
        stopped: SIGSTOP or a debugger holds it, so that it handles no signal.
    """

    pid: int
    parent: int
    rank: int | None
    stopped: bool = False


def find_processes(mark: str, variable: str, system: Path = Path("/proc")) -> list[Process]:
    """The processes on this machine that have a mark, less this one and zombies, which have no environment."""
    found = []
    for folder in system.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            environment = _environment((folder / "environ").read_bytes())
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):  # another user's, or it has just ended
            continue
        if environment.get(MARK) == mark:
            rank = environment.get(variable, "")
            found.append(Process(int(folder.name), int(parent), whole(rank), state in (b"T", b"t")))
    return found


def _environment(content: bytes) -> Mapping[str, str]:
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def ranks_among(processes: Iterable[Process]) -> list[Process]:
    """The ranks, the lowest first, without the processes that they have started, which inherit their variables."""
    numbered = {each.pid: each for each in processes if each.rank is not None}
    ranks = [each for each in numbered.values() if each.parent not in numbered]
    return sorted(ranks, key=lambda each: (each.rank, each.pid))


def send(number: int, mark: str, variable: str, whom: str) -> int:
    """Send a signal to processes of the job on this machine; returns how many got it.

    Args:
        number: the signal's.
        mark: as in `find_processes`.
        variable: as in `find_processes`.
        whom: ``one``: the lowest rank here that is not stopped, which is enough where ranks tell each other of a
            signal; ``all`` ranks; ``every`` process of the job.
    """
    processes = find_processes(mark, variable)
    chosen = processes if whom == "every" else ranks_among(processes)
    if whom == "one":
        chosen = [process for process in chosen if not process.stopped][:1]
    sent = 0
    for process in chosen:
        try:
            os.kill(process.pid, number)
            sent += 1
        except OSError:  # it has just ended
            continue
    return sent


def sending_command(number: int, mark: str, variable: str, whom: str) -> list[str]:
    """The command line that does on another machine what `send` does here."""
    return [sys.executable, "-m", _SELF, str(number), mark, variable, whom]


def main(arguments: Sequence[str]) -> int:
    """Send; the status is 1 where ranks were meant and there are none."""
    number, mark, variable, whom = arguments
    sent = send(int(number), mark, variable, whom)
    return 0 if sent or whom == "every" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# -- restarts ------------------------------------------------------------------------------------------

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0
_DOUBLINGS = 6
"""After so many the delay is the longest."""
_USERS_MISTAKE = 2
_INTERRUPTED = 130
_VARYING = re.compile(r" ?\(?process \d+\)?|\d+(\.\d+)? s\b|0x[0-9a-f]+")
"""What differs in messages of one and the same failure: process numbers, seconds, addresses."""


class Restarts:
    """Counts the starts of a job.

    Args:
        allowed: how often it may be started again.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.made = 0
        """How often it was started again."""
        self._before = ""

    def refusal(self, ending: ExitReport) -> str | None:
        """Why a job that ended so is not started again, empty where there is nothing to say; None: it is.

        To be asked once for each end.
        """
        before, self._before = self._before, failure_way(ending)
        if ending.status == 0 or ending.stopped or not self.allowed:
            return ""
        if ending.status == _USERS_MISTAKE:
            return "another start would meet the same mistake"
        if ending.status == _INTERRUPTED:
            return "it was interrupted"
        if before and before == self._before:
            return f"it failed twice in the same way ({ending.error})"
        if self.made == self.allowed:
            return f"it was started again {self.made} times already (--restarts {self.allowed})"
        return None

    def next_delay(self) -> float:
        """Count another start; returns the seconds to wait before it: 1, 2, 4, … and at most 60."""
        delay = min(_FIRST_SECONDS * 2.0 ** min(self.made, _DOUBLINGS), _LONGEST_SECONDS)
        self.made += 1
        return delay


def failure_way(ending: ExitReport) -> str:
    """What two failures have in common that are the same: the message, which names rank and iteration, less numbers
    that vary. Empty where no message was printed: such failures count as different.
    """
    return _VARYING.sub("", ending.error)


def usable_nodes(left: int, least: int, per_node: int, ranks: int, passes: int) -> int | None:
    """The most hosts, of those left, over which the global batch can be divided; None: fewer than `least` could.

    A rank makes `passes` of its batch in an iteration, ``iter_size``. Fewer ranks make more: their number, times
    iter_size, must be a divisor's of ``ranks * passes``.
    """
    for nodes in range(left, least - 1, -1):
        if nodes > 0 and (passes == 0 or ranks * passes % (nodes * per_node) == 0):
            return nodes
    return None


# -- the job -------------------------------------------------------------------------------------------


COUNT = "CAFFEPY_RESTARTS"
"""The variable that tells processes how often their job was started again."""
SINCE = "CAFFEPY_RESTART_SINCE"
"""When the job was started first, in seconds since 1970, where it was started again: `train` goes on from the newest
whole snapshot that was written since."""
BATCH_RANKS = "CAFFEPY_BATCH_RANKS"
"""The number of ranks that batch_size and iter_size were written for, where there are fewer now."""
LINE = "CAFFEPY_LAUNCH_LINE"
"""The command line of `caffepy launch` before ``--``, which starts as many processes again."""
TERMINAL = "CAFFEPY_TERMINAL"
"""The terminal of `caffepy launch`, for rank 0: ``HOST:/dev/pts/3``."""
_SENDING_SECONDS = 30.0
"""How long the launcher may take to send a signal on another machine, or to find out whether it is there."""


@dataclass(frozen=True)
class LaunchPlan:
    """How a job is started.

    Args:
        job: what, and where.
        commands: its processes, the launcher or the ranks themselves; without their environment.
        environment: of all of them.
        variable: the one that tells a process its rank.
        shares_signals: a signal to one rank is agreed on by all, as in `caffepy train`.
        interrupt_stops: whether SIGINT makes the ranks end.
        terminate_stops: whether SIGTERM does.
        passes: iter_size of what is trained; 0: there is no batch to keep.
        last_signal: what processes get when this one ends before them.
        typed: the command line before ``--``.
    """

    job: Job
    commands: Callable[[Job], Sequence[tuple[Sequence[str], Mapping[str, str]]]]
    environment: Mapping[str, str]
    variable: str
    shares_signals: bool = False
    interrupt_stops: bool = True
    terminate_stops: bool = True
    passes: int = 0
    last_signal: int = signal.SIGTERM
    typed: str = ""


@dataclass
class LaunchedJob:
    """Runs a job under a supervisor.

    Args:
        start: how it is started.
        restarts: how often it may be started again.
        min_nodes: hosts that are enough; None: as many as at first.
    """

    start: LaunchPlan
    restarts: int = 0
    min_nodes: int | None = None
    mark: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        self._job = self.start.job
        self._since = time.time()
        self._counter = Restarts(self.restarts)
        self.supervisor = Supervisor(
            self._deliver,
            self._clear,
            lambda number: send(number, self.mark, self.start.variable, "every"),
            self.start.interrupt_stops,
            self.start.terminate_stops,
        )

    def run(self) -> int:
        """The exit status of the job's last run.

        Raises:
            ConfigError: a program cannot be started.
        """
        with self.supervisor.signals():
            ending = self._run_once()
            while (refusal := self._counter.refusal(ending)) is None:
                delay = self._counter.next_delay()
                self._announce(ending, delay)
                self.supervisor.pause(delay)
                if self.supervisor.stopping or not self._choose_hosts():
                    return ending.status
                ending = self._run_once()
            if refusal:
                logger.warning("not started again: %s", refusal)
        return ending.status

    def _announce(self, ending: ExitReport, delay: float) -> None:
        logger.warning(
            "restart %d of %d in %g s, after %s",
            self._counter.made,
            self.restarts,
            delay,
            ending.error or f"an end with status {ending.status}",
        )

    def _run_once(self) -> ExitReport:
        own = self._own_variables()
        names = sorted({*self._job.exported, *own}) if self._job.hosts or self._job.nodes > 1 else []
        job = replace(self._job, exported=names)
        commands = [
            Command(line, {**self.start.environment, **own, **more}, self.start.last_signal)
            for line, more in self.start.commands(job)
        ]
        try:
            return self.supervisor.run(commands)
        except OSError as error:
            raise ConfigError(f"{commands[0].line[0]} cannot be started: {error.strerror}") from error

    def _own_variables(self) -> dict[str, str]:
        own = {MARK: self.mark, COUNT: str(self._counter.made)}
        if self.start.typed:
            own[LINE] = self.start.typed
        if terminal := name_terminal():
            own[TERMINAL] = terminal
        if self._counter.made:
            # Snapshots of an earlier run in the same folder must not be taken for this job's.
            own[SINCE] = repr(self._since)
        if self._job.size != self.start.job.size:
            # Fewer ranks make more passes an iteration, so that the global batch stays that of the first start.
            own[BATCH_RANKS] = str(self.start.job.size)
        return own

    # -- signals ------------------------------------------------------------------------------------

    def _deliver(self, number: int) -> bool:
        """Send a signal to the ranks: those here directly, those of other hosts by the launcher."""
        whom = "one" if self.start.shares_signals else "all"
        sent = send(number, self.mark, self.start.variable, whom)
        others = [host for host in self._job.hosts if not is_here(host)]
        # A rank here has it, and the ranks agree on it: no program need be started on another host.
        if (sent and whom == "one") or not (others or self._job.nodes > 1):
            return sent > 0
        there = self._send_there(number, others[:1] if whom == "one" else others, whom)
        return sent > 0 or there

    def _send_there(self, number: int, hosts: Sequence[str], whom: str) -> bool:
        """Send a signal to the ranks of the named hosts; of all hosts of the job where none is named."""
        program = sending_command(number, self.mark, self.start.variable, whom)
        job = replace(self._job, program=program, per_node=1, hosts=list(hosts), oversubscribe=True)
        return self._run_beside(replace(job, nodes=len(hosts) or self._job.nodes))

    def _run_beside(self, job: Job) -> bool:
        """Run a small program with the launcher beside the job; whether it ended well."""
        job = replace(job, exported=[name for name in job.exported if name == "PYTHONPATH"])
        # a step of Slurm's would wait for the CPUs that the job's step holds
        environment = {**self.start.environment, "SLURM_OVERLAP": "1"}
        for line, more in self.start.commands(job):
            try:
                done = subprocess.run(
                    line,
                    env={**environment, **more},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_SENDING_SECONDS,
                    start_new_session=True,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                logger.debug("%s: %s", line, error)
                return False
            if done.returncode:
                logger.debug("%s: status %d: %s", line, done.returncode, done.stderr.decode(errors="replace"))
                return False
        return True

    def _clear(self) -> int:
        """Wait for the job's processes on this machine to end, and kill the others after that."""
        # Ranks that lost another rank end by themselves within ten seconds, and say why; killed at once they could not.
        end = time.monotonic() + (0.0 if self.supervisor.stopping else END_SECONDS)
        while find_processes(self.mark, self.start.variable) and time.monotonic() < end:
            time.sleep(0.05)
        return send(signal.SIGKILL, self.mark, self.start.variable, "every")

    # -- hosts --------------------------------------------------------------------------------------

    def _choose_hosts(self) -> bool:
        """Take the hosts that are left where fewer are enough; whether the job can be started."""
        job = self.start.job
        if self.min_nodes is None or self.min_nodes >= len(job.hosts):
            return True
        left = self._hosts_left(job.hosts)
        lost = ", ".join(host for host in job.hosts if host not in left) or "none"
        count = usable_nodes(len(left), self.min_nodes, job.per_node, job.size, self.start.passes)
        if count is None:
            logger.error(
                "not started again: %s cannot be reached, and among %d hosts the batch of %d ranks cannot be divided, "
                "or they are fewer than --min-nodes %d",
                lost,
                len(left),
                job.size,
                self.min_nodes,
            )
            return False
        if count < len(job.hosts):
            logger.warning("going on with %s; %s cannot be reached", ", ".join(left[:count]), lost)
        self._job = replace(job, hosts=left[:count], nodes=count)
        return True

    def _hosts_left(self, hosts: Sequence[str]) -> list[str]:
        """The hosts on which the launcher can start a process, which kills processes of the job that are left there."""
        program = sending_command(signal.SIGKILL, self.mark, self.start.variable, "every")
        job = replace(self._job, program=program, per_node=1, nodes=1, oversubscribe=True)
        with ThreadPoolExecutor(min(len(hosts), 16)) as pool:
            answers = list(pool.map(lambda host: is_here(host) or self._run_beside(replace(job, hosts=[host])), hosts))
        return [host for host, answer in zip(hosts, answers, strict=True) if answer]


def is_here(host: str) -> bool:
    """Whether a host's name is one of this machine's."""
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0]) or host.partition(".")[0] == own


def name_terminal() -> str | None:
    """This process's terminal as the variable `TERMINAL` names it; None if stderr is none."""
    try:
        return f"{socket.gethostname()}:{os.ttyname(2)}"
    except OSError:
        return None


def environment_of(variables: Mapping[str, str], base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job's processes, without what an older launch has left in it."""
    kept = {
        name: value for name, value in base.items() if name not in (MARK, COUNT, SINCE, BATCH_RANKS, LINE, TERMINAL)
    }
    return {**kept, **variables}
