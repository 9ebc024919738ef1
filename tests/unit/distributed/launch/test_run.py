"""A job from its first start to its end, with a launcher that is played."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from caffepy.distributed.launch import run as launch_run
from caffepy.distributed.launch.launchers import Job
from caffepy.distributed.launch.run import (
    BATCH_RANKS,
    COUNT,
    MARK,
    SINCE,
    LaunchedJob,
    LaunchPlan,
    Restarts,
    environment_of,
    is_here,
)
from caffepy.errors import ConfigError

LOST = "caffepy: error: rank 1 on b at iteration 5 ended unexpectedly"
VARIABLES = (MARK, COUNT, SINCE, BATCH_RANKS)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "next_delay", lambda self: setattr(self, "made", self.made + 1) or 0.01)
    monkeypatch.setattr(launch_run, "END_SECONDS", 0.5)


class PlayedLauncher:
    """A launcher in sh that writes down what it was asked and does what `acts` says, one for each start.

    Args:
        folder: for what it writes.
        acts: shell commands; the last is used for all further starts.
        down: hosts on which nothing can be started.
    """

    def __init__(self, folder: Path, acts: Sequence[str], down: Sequence[str] = ()) -> None:
        self.folder, self.acts, self.down = folder, list(acts), down
        self.jobs: list[Job] = []
        self.beside: list[Job] = []

    def __call__(self, job: Job) -> list[tuple[list[str], Mapping[str, str]]]:
        if "caffepy.distributed.launch.run" in job.program:
            self.beside.append(job)
            bad = any(host in self.down for host in job.hosts)
            return [(["/bin/sh", "-c", "exit 255" if bad else "exit 0"], {})]
        act = self.acts[min(len(self.jobs), len(self.acts) - 1)]
        self.jobs.append(job)
        names = " ".join(f"{name}=${name}" for name in VARIABLES)
        return [(["/bin/sh", "-c", f"echo {names} >> {shlex.quote(str(self.folder / 'seen'))}; {act}"], {})]

    def start(self, job: Job, **fields: object) -> LaunchPlan:
        return LaunchPlan(job, self, environment_of({}), "RANK", **fields)  # type: ignore[arg-type]

    def seen(self) -> list[dict[str, str]]:
        """The variables of each start."""
        lines = (self.folder / "seen").read_text().splitlines()
        return [dict(word.split("=", 1) for word in line.split()) for line in lines]


def test_a_lost_rank_is_started_again_and_told_since_when(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "caffepy")
    launcher = PlayedLauncher(tmp_path, [f"echo '{LOST}' >&2; exit 1", "exit 0"])
    begin = time.time()
    job = LaunchedJob(launcher.start(Job(["caffepy"], 2)), restarts=3)
    assert job.run() == 0
    first, second = launcher.seen()
    assert (first[COUNT], first[SINCE], first[BATCH_RANKS]) == ("0", "", "")
    assert second[COUNT] == "1" and begin <= float(second[SINCE]) <= time.time() and second[BATCH_RANKS] == ""
    assert first[MARK] == second[MARK] == job.mark
    assert "restart 1 of 3 in 0.01 s, after rank 1 on b at iteration 5 ended unexpectedly" in caplog.text


def test_the_same_failure_twice_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launcher = PlayedLauncher(tmp_path, [f"echo '{LOST}' >&2; exit 1"])
    assert LaunchedJob(launcher.start(Job(["caffepy"], 2)), restarts=9).run() == 1
    assert len(launcher.jobs) == 2
    assert "not started again: it failed twice in the same way (rank 1 on b at iteration 5" in caplog.text


def test_without_restarts_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launcher = PlayedLauncher(tmp_path, ["exit 7"])
    assert LaunchedJob(launcher.start(Job(["caffepy"], 2))).run() == 7
    assert not caplog.text and len(launcher.jobs) == 1


def test_variables_are_exported_to_other_hosts(tmp_path: Path) -> None:
    launcher = PlayedLauncher(tmp_path, ["exit 1", "exit 0"])
    job = Job(["caffepy"], 2, 2, ["a", "b"], exported=["NCCL_DEBUG"])
    assert LaunchedJob(launcher.start(job), restarts=1).run() == 0
    assert launcher.jobs[0].exported == [MARK, COUNT, "NCCL_DEBUG"]
    assert launcher.jobs[1].exported == [MARK, COUNT, SINCE, "NCCL_DEBUG"]


def test_it_goes_on_with_the_hosts_that_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """32 batches of an iteration cannot be divided among the 24 ranks of three hosts, but among those of two."""
    launcher = PlayedLauncher(tmp_path, ["exit 1", "exit 0"], down=["b"])
    job = Job(["caffepy"], 8, 4, ["a", "b", "c", "d"])
    assert LaunchedJob(launcher.start(job, passes=1), restarts=1, min_nodes=1).run() == 0
    assert (launcher.jobs[1].hosts, launcher.jobs[1].nodes) == (["a", "c"], 2)
    assert launcher.seen()[1][BATCH_RANKS] == "32"
    assert BATCH_RANKS in launcher.jobs[1].exported
    assert sorted(host for each in launcher.beside for host in each.hosts) == ["a", "b", "c", "d"]
    assert all(each.program[-1] == "every" and each.size == 1 for each in launcher.beside)  # clears what is left there
    assert "going on with a, c; b cannot be reached" in caplog.text


@pytest.mark.parametrize(("least", "started"), [(2, 2), (3, 1)])
def test_fewer_hosts_than_allowed_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, least: int, started: int
) -> None:
    launcher = PlayedLauncher(tmp_path, ["exit 1", "exit 0"], down=["b", "c"])
    job = Job(["caffepy"], 1, 4, ["a", "b", "c", "d"])
    status = LaunchedJob(launcher.start(job, passes=1), restarts=1, min_nodes=least).run()
    assert (status, len(launcher.jobs)) == (int(started == 1), started)
    assert (f"they are fewer than --min-nodes {least}" in caplog.text) == (started == 1)


def test_all_hosts_are_taken_where_no_fewer_are_allowed(tmp_path: Path) -> None:
    launcher = PlayedLauncher(tmp_path, ["exit 1", "exit 0"], down=["b"])
    assert LaunchedJob(launcher.start(Job(["caffepy"], 1, 2, ["a", "b"])), restarts=1).run() == 0
    assert launcher.jobs[1].hosts == ["a", "b"] and not launcher.beside


@pytest.mark.parametrize(
    ("shares", "hosts", "asked"), [(True, ["a", "b"], ["a"]), (False, ["a", "b"], ["a", "b"]), (True, [], [])]
)
def test_ranks_of_other_hosts_get_signals_by_the_launcher(
    tmp_path: Path, shares: bool, hosts: list[str], asked: list[str]
) -> None:
    """Where all agree on what one was asked, one is asked."""
    launcher = PlayedLauncher(tmp_path, ["sleep 0.8"])
    job = LaunchedJob(launcher.start(Job(["caffepy"], 2, 2, hosts), shares_signals=shares), restarts=1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert job.run() == 0
    (beside,) = launcher.beside
    assert (beside.hosts, beside.nodes, beside.per_node) == (asked, len(asked) or 2, 1)
    assert beside.program[-4:] == ["15", job.mark, "RANK", "one" if shares else "all"]


def test_ranks_of_this_machine_get_signals_directly(tmp_path: Path) -> None:
    rank = "trap 'echo {rank} >> got; exit 0' TERM; while :; do sleep 0.05; done"
    ranks = " ".join(f"RANK={rank_} sh -c {shlex.quote(rank.format(rank=rank_))} &" for rank_ in range(2))
    launcher = PlayedLauncher(tmp_path, [f"cd {shlex.quote(str(tmp_path))}; {ranks} wait"])
    job = LaunchedJob(launcher.start(Job(["caffepy"], 2)), restarts=1)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert job.run() == 0 and job.supervisor.stopping
    assert sorted((tmp_path / "got").read_text().split()) == ["0", "1"] and not launcher.beside


def test_ranks_that_a_dead_launcher_left_behind_do_not_meet_the_next(tmp_path: Path) -> None:
    left = "setsid sh -c 'exec sleep 60' & echo $! > left; kill -9 $$"
    after = "if kill -0 $(cat left) 2>/dev/null && ! grep -q Z /proc/$(cat left)/stat; then exit 5; fi; exit 0"
    folder = shlex.quote(str(tmp_path))
    launcher = PlayedLauncher(tmp_path, [f"cd {folder}; {left}", f"cd {folder}; {after}"])
    assert LaunchedJob(launcher.start(Job(["caffepy"], 1)), restarts=1).run() == 0
    assert len(launcher.jobs) == 2


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    start = LaunchPlan(Job(["caffepy"], 1), lambda job: [(["/nowhere/mpirun"], {})], {}, "RANK")
    with pytest.raises(ConfigError, match="/nowhere/mpirun cannot be started: No such file"):
        LaunchedJob(start).run()


def test_an_older_launch_leaves_nothing_in_the_environment() -> None:
    assert environment_of({"B": "2"}, {**dict.fromkeys(VARIABLES, "x"), "A": "1"}) == {"A": "1", "B": "2"}


def test_names_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7.cluster")
    assert [is_here(host) for host in ("localhost", "node7", "node7.cluster", "node70", "node8")] == [
        True,
        True,
        True,
        False,
        False,
    ]
