"""One training run, from joining the world to the report, and all the ways in which it ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_graph_backend import NET
from fake_world import FakeWatchdog, FakeWorld
from training import solver_param

from caffepy.errors import AbortedError, ConfigError, PeerError, RunError
from caffepy.parallel import p2p_manager
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.device_threads import DeviceSpec
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.p2p_manager import P2PManager
from caffepy.parallel.p2p_sync import P2PSync
from caffepy.parallel.store.records import Failure
from caffepy.proto.caffe_pb2 import NetParameter, SolverState
from caffepy.report import Performance
from caffepy.solvers import Solver
from caffepy.solvers.callbacks import Action

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" random_seed: 3 snapshot_after_train: false max_iter: 5 '


def run(solvers: int) -> None:
    P2PManager(TrainOptions(solver_param(SOLVER, NET), cpu_solvers=solvers, threads=1, timeout=300)).run()


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_was_aborted_without_a_failure_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    """Whatever lets a wait go: nobody may take it for the end of training."""
    solve = Solver.solve

    def let_go(solver: Solver) -> None:
        solver.step(2)
        if solver.callback.is_root:
            raise AbortedError("another solver thread failed")
        solve(solver)

    monkeypatch.setattr(Solver, "solve", let_go)
    where = "device CPU 0, iteration 2: " if solvers > 1 else "^"
    text = r"training was stopped, and no device said why \(another solver thread failed\); go on from the last"
    with pytest.raises(RunError, match=where + text):
        run(solvers)


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    monkeypatch.setattr(Solver, "solve", lambda solver: solver.step(3))
    with pytest.raises(RunError, match="training has ended before max_iter, and no device said why; go on from"):
        run(solvers)


def test_a_thread_that_was_never_let_go_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P2PSync, "go", lambda sync, state: sync.abort())
    with pytest.raises(RunError, match="training was stopped before it began"):
        run(1)


@pytest.mark.parametrize("solvers", [1, 2])
def test_the_end_of_training_and_a_stop_are_none(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    run(solvers)
    polls = iter([Action.NONE, Action.NONE, Action.STOP])
    monkeypatch.setattr("caffepy.parallel.signals.SignalRequests.__call__", lambda requests: next(polls, Action.NONE))
    run(solvers)
    assert next(polls, None) is None


# -- with played devices and ranks ------------------------------------------------------------------------


class FakeSync:
    """A device without a thread: it is ready when it is started, and trains when it is let go.

    `on_start` and `on_go` are what it meets then.
    """

    on_start: Callable[[FakeSync], None] = lambda sync: None
    on_go: Callable[[FakeSync], None] = lambda sync: None

    def __init__(
        self,
        spec: DeviceSpec,
        options: TrainOptions,
        connect: Callable[[], Any],
        request: Callable[[], Action],
        on_change: Callable[[Any], None],
        names: Sequence[str],
    ) -> None:
        self.spec, self.connect, self.request, self.names = spec, connect, request, names
        self.ready, self.finished = threading.Event(), threading.Event()
        self.heartbeat = Heartbeat(spec.label, lambda: 7)
        self.error: BaseException | None = None
        self.completed = False
        self.location = f"device {spec.label}, iteration 7" if spec.shard.world_size > 1 else ""
        self.performance = Performance(64, 100, 10.0, spec.label)
        self.events: list[dict[str, Any]] = []
        self.solver: Any = SimpleNamespace(net=SimpleNamespace(param=NetParameter()), restored=None)
        self.solver.performance = self.performance
        self.log: list[Any] = []
        self._on_change = on_change

    def start(self) -> None:
        self.log.append("start")
        type(self).on_start(self)
        self._on_change(self)
        if self.error is not None or self.spec.shard.world_size == 1:
            self.ready.set()
        else:  # later than a device that fails
            threading.Timer(0.05, self.ready.set).start()

    def go(self, state: SolverState | None) -> None:
        self.log.append("go")
        self.state = state
        type(self).on_go(self)

    def abort(self) -> None:
        self.log.append("abort")

    def join(self, seconds: float) -> bool:
        self.log.append("join")
        return True

    def finish(self, error: BaseException | None = None) -> None:
        self.error, self.completed = error, error is None
        self.finished.set()
        self._on_change(self)


class PlayedWatchdog(FakeWatchdog):
    """Keeps what it is made of, too."""

    def __init__(self, world: FakeWorld, channel: Any, heartbeats: list[Any], timeout: float, on_failure: Any) -> None:
        super().__init__()
        self.channel = channel
        self.peer_failed: Callable[[Failure], None] = on_failure
        self.heartbeats = heartbeats


class Played:
    """A run of played devices, in a world of played ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs: list[FakeSync] = []
        self.watchdogs: list[PlayedWatchdog] = []
        self.world = FakeWorld()
        self.start: Callable[[FakeSync], None] = lambda sync: None
        self.go: Callable[[FakeSync], None] = lambda sync: sync.finish()
        monkeypatch.setattr(p2p_manager, "create_world", lambda: self.world)
        monkeypatch.setattr(p2p_manager, "connect_training", lambda world: None)
        monkeypatch.setattr(p2p_manager, "Watchdog", self._watchdog)
        monkeypatch.setattr(p2p_manager, "P2PSync", self._sync)
        monkeypatch.setattr("caffepy.parallel.agreement.describe_nets", lambda solver: {})
        monkeypatch.setattr("caffepy.parallel.failures._TELL_SECONDS", 0.05)
        for variable in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(variable, raising=False)

    def _watchdog(self, *arguments: Any) -> PlayedWatchdog:
        self.watchdogs.append(PlayedWatchdog(*arguments))
        return self.watchdogs[-1]

    def _sync(self, *arguments: Any) -> FakeSync:
        played = self

        class Sync(FakeSync):
            def on_start(self) -> None:
                played.start(self)

            def on_go(self) -> None:
                played.go(self)

        self.syncs.append(Sync(*arguments))
        return self.syncs[-1]

    @property
    def watchdog(self) -> PlayedWatchdog:
        (watchdog,) = self.watchdogs
        return watchdog

    def run(self, world: FakeWorld | None = None, solvers: int = 1, **options: Any) -> None:
        self.world = world or self.world
        P2PManager(TrainOptions(solver_param(SOLVER, NET), cpu_solvers=solvers, timeout=300, **options)).run()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def more_solvers(rank: int, value: Any) -> Any:
    """The answer of a rank with one CPU solver more."""
    return value + 1 if type(value) is int and value < 5 else value


def test_the_root_refuses_ranks_that_do_not_agree(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="rank 0 on h0 has 1 CPU solver, rank 1 on h1 has 2 CPU solvers; give"):
        played.run(FakeWorld(2, answer=more_solvers))
    assert played.syncs == [] and played.watchdogs == []
    assert played.world.ended == [] and messages(caplog, logging.ERROR) == [], "the caller prints it"


def test_other_ranks_leave_silently_where_they_do_not_agree(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match=f"^{ConfigError.exit_status}$"):
        played.run(FakeWorld(2, 1, answer=more_solvers))
    assert played.world.ended == [] and messages(caplog, logging.ERROR) == []


def test_options_that_are_wrong_end_the_run_before_anything_is_made(played: Played) -> None:
    with pytest.raises(ConfigError, match="timeout: '0' is not a number of seconds above 0"):
        P2PManager(lambda: TrainOptions(solver_param(SOLVER, NET), timeout=0)).run()
    assert played.syncs == []


def test_a_run_goes_from_the_start_of_the_threads_to_the_report(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        played.run(solvers=2)
    assert [sync.log for sync in played.syncs] == [["start", "go"]] * 2
    assert [sync.spec.label for sync in played.syncs] == ["CPU 0", "CPU 1"]
    assert played.syncs[0].names == ["device CPU 0", "device CPU 1"]
    assert played.watchdog.log == ["start", "stop"]
    assert played.watchdog.heartbeats == [sync.heartbeat for sync in played.syncs]
    lines = messages(caplog, logging.INFO)
    assert [line.split(" on ")[0] for line in lines[1:3]] == ["Device 0: rank 0", "Device 1: rank 0"]
    assert lines[3] == "Transport memory of one process between devices of all pairs"
    assert lines[4].startswith("Initializing solver from parameters, ")
    batch = lines.index("Starting Optimization") - 1
    assert lines[batch - 1] == "| snapshot_after_train: false" and lines[5].startswith("| ")
    assert lines[batch].startswith("Batch: 64 per device, 128 per rank")
    assert lines[-1].startswith("Overall performance: 1280 img/sec")


def test_the_iteration_is_that_of_the_first_device(played: Played) -> None:
    manager = P2PManager(TrainOptions(solver_param(SOLVER, NET), timeout=300))
    assert manager.iteration == 0
    manager.run()
    assert manager.iteration == 7


def test_all_devices_start_from_what_the_root_has_restored(played: Played) -> None:
    def restore(sync: FakeSync) -> None:
        sync.solver.restored = SolverState(iter=5) if sync.spec.index == 0 else None

    played.start = restore
    played.run(solvers=2)
    assert [sync.state.iter for sync in played.syncs if sync.state] == [5, 5]


@pytest.mark.parametrize(("rank", "printed"), [(0, True), (1, False)])
def test_the_report_is_printed_on_the_root_only(
    played: Played, caplog: pytest.LogCaptureFixture, rank: int, printed: bool
) -> None:
    with caplog.at_level(logging.INFO):
        played.run(FakeWorld(2, rank))
    reports = [line for line in messages(caplog, logging.INFO) if "performance" in line]
    assert len(reports) == (3 if printed else 0)
    assert ("Starting Optimization" in messages(caplog, logging.INFO)) == printed


def broken(sync: FakeSync) -> None:
    """The last device of the process meets an error; the others meet nothing."""
    if sync.spec.index == sync.spec.shard.devices_per_rank - 1:
        sync.error = RunError("the disk is full")


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_thread_that_fails_before_the_start_is_one_error_for_all(
    played: Played, caplog: pytest.LogCaptureFixture, size: int, rank: int
) -> None:
    """In every rank: the root raises it as it is, the others leave, and nobody begins to train."""
    played.start = broken
    with pytest.raises(SystemExit if rank else RunError, match="^1$" if rank else "^the disk is full$"):
        played.run(FakeWorld(size, rank), solvers=2)
    assert [sync.log for sync in played.syncs] == [["start", "abort", "join"]] * 2
    assert played.world.ended == [] and messages(caplog, logging.ERROR) == []
    assert played.watchdog.told == [] and played.watchdog.log == ["start", "stop"]


def fail_in_training(sync: FakeSync) -> None:
    if sync.spec.index == sync.spec.shard.devices_per_rank - 1:
        sync.finish(RunError("the disk is full"))


@pytest.mark.parametrize(("solvers", "where"), [(1, ""), (2, "device CPU 1, iteration 7: ")])
def test_a_thread_that_fails_in_training_ends_the_others_of_its_process(
    played: Played, caplog: pytest.LogCaptureFixture, solvers: int, where: str
) -> None:
    played.go = fail_in_training
    with pytest.raises(RunError, match=f"^{where}the disk is full$"):
        played.run(solvers=solvers)
    assert [sync.log for sync in played.syncs] == [["start", "go", "abort", "join"]] * solvers
    assert messages(caplog, logging.ERROR) == [] and played.world.ended == []


def test_a_thread_that_fails_in_training_ends_all_ranks(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    played.go = fail_in_training
    message = "rank 0 on h0, device CPU, iteration 7: the disk is full"
    with pytest.raises(PeerError, match=f"^{message}$"):
        played.run(FakeWorld(2))
    assert messages(caplog, logging.ERROR) == [message] and played.world.ended == [RunError.exit_status]
    assert [(failure.message, failure.reported) for failure in played.watchdog.told] == [(message, True)]
    assert played.watchdog.log == ["start", "stop"], "it is stopped after it has told"


def test_a_thread_that_ends_early_without_an_error_is_one(played: Played) -> None:
    played.go = lambda sync: sync.finished.set()
    with pytest.raises(RunError, match="^training has ended before max_iter, and no device said why; go on from"):
        played.run()


@pytest.mark.parametrize("reported", [True, False], ids=["root has printed it", "nobody has"])
def test_what_the_watchdog_says_of_another_rank_ends_this_one(
    played: Played, caplog: pytest.LogCaptureFixture, reported: bool
) -> None:
    failure = Failure("rank 0 on h0 is gone", 3, reported=reported)
    played.go = lambda sync: played.watchdog.peer_failed(failure)  # and this device never finishes
    with pytest.raises(PeerError, match="^rank 0 on h0 is gone$"):
        played.run(FakeWorld(2, 1))
    assert messages(caplog, logging.ERROR) == ([] if reported else ["rank 0 on h0 is gone"])
    assert played.syncs[0].log == ["start", "go", "abort", "join"]
    assert played.world.ended == [3]


def test_an_exchange_between_ranks_ends_when_the_watchdog_finds_a_failure(played: Played) -> None:
    """MPI calls what `watch` was given as long as another rank does not come."""
    played.start = lambda sync: played.watchdog.peer_failed(Failure("rank 1 on h1 is gone", 3))

    def gather(value: Any) -> list[Any]:
        if played.watchdogs:
            played.world.check()
        return FakeWorld.all_gather(played.world, value)

    played.world = FakeWorld(2)
    played.world.all_gather = gather  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="^rank 1 on h1 is gone$"):
        played.run()
    assert played.world.ended == [3] and "go" not in played.syncs[0].log


@pytest.mark.parametrize("interrupts", [1, 2])
def test_the_second_interrupt_ends_the_world_at_once(
    played: Played, caplog: pytest.LogCaptureFixture, interrupts: int
) -> None:
    requests = []

    def interrupt(sync: FakeSync) -> None:
        if sync.spec.index == 1:
            for _ in range(interrupts):
                os.kill(os.getpid(), signal.SIGINT)
            requests.extend(each.request() for each in (sync, played.syncs[0]))
        sync.finish()

    played.go = interrupt
    before = signal.getsignal(signal.SIGINT)
    played.run(FakeWorld(2), solvers=2)
    assert requests == [Action.NONE, Action.STOP], "the first thread of a process takes all requests"
    assert played.world.ended == ([130] if interrupts == 2 else [])
    assert messages(caplog, logging.ERROR) == ["interrupted again: ending at once"] * (interrupts - 1)
    assert [failure.status for failure in played.watchdog.told] == [130] * (interrupts - 1)
    assert signal.getsignal(signal.SIGINT) is before
