from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from caffepy.distributed import liveness as heartbeat
from caffepy.distributed import rendezvous as connect
from caffepy.distributed.liveness import Heartbeat, Watchdog, find_stall
from caffepy.distributed.processes.world import SingleProcess
from caffepy.distributed.rendezvous import connect_training
from caffepy.distributed.store import store
from caffepy.distributed.store.client import ControlClient
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.wire import DeviceStatus, Failure
from caffepy.errors import PeerError
from caffepy.utils.clocks import SuspendAwareClock


def state(rank: int, collectives: int, waiting: str = "", seconds: float = 0.0, iteration: int = 5) -> DeviceStatus:
    return DeviceStatus(rank, f"host{rank}", 100 + rank, "0", iteration, collectives, waiting, seconds)


class FakeWorld(SingleProcess):
    """A rank among several, without MPI: ranks of one process that hand each other values in `exchange`."""

    def __init__(self, rank: int, size: int, exchange: list[list[object]] | None = None) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.hosts = [f"host{i}" for i in range(size)]
        self.machines = ["machine"] * size
        self._exchange = exchange or [[] for _ in range(size)]
        self._round = 0

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        self._exchange[self.rank].append(value)
        self._round += 1
        assert eventually(lambda: all(len(values) >= self._round for values in self._exchange))
        return [values[self._round - 1] for values in self._exchange]


def eventually(condition: Callable[[], object], seconds: float = 300.0) -> bool:
    """Whether a condition comes true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_short_waits_and_long_computations_are_no_stall() -> None:
    assert find_stall([state(0, 3, "a barrier", 9.0), state(1, 2, "", 9.0)], 10.0) is None
    assert find_stall([state(0, 3, "", 1000.0)], 10.0) is None


def describe(*states: DeviceStatus) -> str:
    stall = find_stall(list(states), 10.0)
    assert stall is not None
    return stall.describe(10.0, "nobody knows whom")


def test_the_device_that_has_not_come_is_named() -> None:
    message = describe(state(0, 8, "the all-reduce", 12.0), state(1, 7, "", 13.0, 4), state(2, 8, "x", 11.0))
    assert message == (
        "rank 0 on host0, process 100, device 0 has waited 12 s in the all-reduce of iteration 5 for "
        "rank 1 on host1, process 101, device 0, which is in iteration 4 and computes since 13 s; "
        "look at that process, or allow more than 10 s with --timeout"
    )


def test_the_furthest_behind_is_named_among_several_or_none_if_all_wait() -> None:
    message = describe(state(0, 9, "x", 20.0), state(1, 8, "y", 20.0), state(2, 5))
    assert "for rank 2 on" in message and "since 0 s, and for 1 more;" in message
    assert "for nobody knows whom;" in describe(state(0, 9, "x", 20.0), state(1, 9, "x", 20.0))


def reader(seconds: float) -> DeviceStatus:
    return replace(state(1, 7, seconds=seconds), reading="record 12 of LMDB 'x'")


def test_what_the_late_device_reads_is_named() -> None:
    message = describe(state(0, 8, "the all-reduce", 12.0), reader(11.0))
    assert "for rank 1 on host1, process 101, device 0, which is in iteration 5 and waits for record 12 of " in message
    assert "of LMDB 'x' to be read since 11 s; look at that process" in message


def test_a_device_that_waits_for_its_data_alone_is_named() -> None:
    assert find_stall([state(0, 7, "", 99.0), reader(9.0)], 10.0) is None
    assert describe(state(0, 7, "", 99.0), reader(11.0)) == (
        "rank 1 on host1, process 101, device 0 has waited 11 s in iteration 5 for record 12 of LMDB 'x'; "
        "look at that disk or network drive, or allow more than 10 s with --timeout"
    )


def test_the_first_iteration_may_last_longer() -> None:
    waits = [replace(state(0, 3, "the all-reduce", seconds), starting=True) for seconds in (11.0, 69.0, 71.0)]
    assert [find_stall([wait], 10.0) is not None for wait in waits] == [False, False, True]
    iterations = [0]
    beat = Heartbeat("0", lambda: iterations[0], begun=False)
    assert beat.status(0, "host0").starting
    iterations[0] = 500  # a snapshot
    beat.begin()
    assert beat.status(0, "host0").starting
    iterations[0] = 501
    assert not beat.status(0, "host0").starting


def test_an_operation_that_goes_on_says_how_far_it_has_come() -> None:
    parts = iter(("part 1", "part 2"))
    beat = Heartbeat("0")
    with beat.collective(lambda: next(parts)):
        assert [beat.status(0, "host0").waiting for _ in range(2)] == ["part 1", "part 2"]
    assert beat.status(0, "host0").waiting == ""


def test_heartbeats_count_collectives_and_stays_marked_after_an_error() -> None:
    beat = Heartbeat("0", lambda: 3)
    with beat.collective("a"):
        inside = beat.status(0, "host0")
    assert (inside.collectives, inside.waiting, inside.iteration) == (1, "a", 3)
    assert beat.status(0, "host0").waiting == ""
    with pytest.raises(ValueError), beat.collective("b"):
        raise ValueError
    assert (beat.status(0, "host0").collectives, beat.status(0, "host0").waiting) == (2, "b")


class Group:
    """Ranks of one process, joined by a real control channel."""

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        exchange: list[list[object]] = [[] for _ in range(size)]
        self.worlds = [FakeWorld(rank, size, exchange) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            self.channels = list(pool.map(connect_training, self.worlds))
        self.heartbeats = [Heartbeat("CPU", lambda: 7) for _ in range(size)]
        self.failures: list[list[Failure]] = [[] for _ in range(size)]
        self.dogs = [
            Watchdog(self.worlds[i], self.channels[i], [self.heartbeats[i]], timeout, partial(self.fail, i))
            for i in range(size)
        ]
        for dog in self.dogs:
            dog.start()
        # Rank 0 has to know all ranks before it can miss one.
        assert eventually(lambda: {status.rank for status in self.channels[0].statuses()} == set(range(size)))

    def fail(self, rank: int, failure: Failure) -> None:
        """What a manager does with a failure."""
        self.failures[rank].append(failure)
        if rank == 0 and not failure.reported:
            self.dogs[0].tell_failure(failure)

    def kill(self, rank: int) -> None:
        """Close a rank's connections as its kernel would, without a good-bye."""
        channel = self.channels[rank]
        if isinstance(channel, ControlClient):
            channel._control.shutdown(2)
        elif isinstance(channel, ControlServer):
            channel._closing = True
            for line in list(channel._lines):
                line.shutdown(2)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    monkeypatch.setattr("caffepy.distributed.liveness._LEAVE_SECONDS", 0.5)  # who was killed waits for nobody
    made: list[Group] = []

    def make(size: int, timeout: float = 300.0) -> Group:
        made.append(Group(size, timeout))
        return made[-1]

    yield make
    for one in made:
        for dog in reversed(one.dogs):  # rank 0, the last, stays for the others to leave
            dog.stop()


def test_a_lost_rank_is_noticed_named_and_told_to_all(group: Callable[..., Group]) -> None:
    three = group(3)
    three.kill(1)
    assert eventually(lambda: three.failures[0] and three.failures[2])
    (seen,), (told,) = three.failures[0], three.failures[2]
    assert seen.message.startswith("rank 1 on host1 (process ") and "at iteration 7 ended unexpectedly" in seen.message
    assert told.reported and not seen.reported and told.message == seen.message


def test_the_loss_of_rank_0_is_told_by_rank_1(group: Callable[..., Group]) -> None:
    two = group(2)
    two.kill(0)
    assert eventually(lambda: two.failures[1])
    assert "rank 0 on host0 at iteration 7 ended unexpectedly" in two.failures[1][0].message
    assert not two.failures[1][0].reported


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_reaches_all_others(group: Callable[..., Group], culprit: int, reported: bool) -> None:
    three = group(3)
    three.dogs[culprit].tell_failure(Failure("rank x: it broke", 2, reported))
    others = [failures for rank, failures in enumerate(three.failures) if rank != culprit]
    assert eventually(lambda: all(others))
    assert all(failure.message == "rank x: it broke" and failure.status == 2 for (failure,) in others)
    for rank, (failure,) in enumerate(others, start=culprit == 0):
        assert failure.reported == (reported or rank > 0 or culprit == 0)  # rank 0 tells the user


def test_rank_0_answers_whoever_left_the_report_to_it(group: Callable[..., Group]) -> None:
    three = group(3)
    three.dogs[1].tell_failure(Failure("rank 1: it broke", 2))
    assert eventually(lambda: three.failures[1])
    assert three.failures[1][0].reported


def test_an_orderly_end_is_no_failure(group: Callable[..., Group]) -> None:
    two = group(2)
    two.dogs[1].stop()
    two.dogs[0].stop()
    assert two.failures == [[], []]


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_keeps_others_waiting_is_named(group: Callable[..., Group], sleeper: int) -> None:
    two = group(2, timeout=1.0)
    done = threading.Event()

    def wait() -> None:
        with two.heartbeats[1 - sleeper].collective("the gradients' all-reduce"):
            done.wait(300)

    threading.Thread(target=wait, daemon=True).start()
    assert eventually(lambda: two.failures[0])
    done.set()
    assert f"for rank {sleeper} on host{sleeper}, process" in two.failures[0][0].message


def test_a_thread_that_fails_ends_training_with_its_error() -> None:
    error = ZeroDivisionError("no")

    def iteration() -> int:
        raise error

    failures: list[Failure] = []
    world = FakeWorld(0, 1)
    dog = Watchdog(world, connect_training(world), [Heartbeat("CPU", iteration)], 60.0, failures.append)
    dog._thread.start()
    assert eventually(lambda: failures)
    assert failures[0].error is error and not failures[0].reported
    assert failures[0].message == "the control plane of this process ended by ZeroDivisionError: no"


def test_a_rank_that_cannot_connect_trains_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> ControlClient:
        raise PeerError("rank 0 does not answer")

    monkeypatch.setattr(connect, "ControlClient", refuse)
    exchange: list[list[object]] = [[], []]
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING):
        server, alone = pool.map(lambda rank: connect_training(FakeWorld(rank, 2, exchange)), range(2))
    assert caplog.messages == [
        "no TCP connection from rank 1 on host1 to rank 0 on host0: its sudden end would not be noticed"
    ]
    assert alone.watch([], 0.01) is None
    server.close()


def test_ranks_of_one_machine_listen_on_the_loopback_address_alone(group: Callable[..., Group]) -> None:
    two = group(2)
    assert two.channels[0]._listening.getsockname()[0] == "127.0.0.1"


class Clock:
    """Plays `suspend_aware_seconds`, for all processes of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._clock = SuspendAwareClock(lambda: self.now)
        for module in (heartbeat, store):
            monkeypatch.setattr(module, "suspend_aware_seconds", self._clock.read)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self._clock.read()


@pytest.mark.parametrize("rank", [0, 1])
def test_time_of_suspension_is_no_waiting(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    clock = Clock(monkeypatch)
    beat = Heartbeat("CPU", lambda: 7)
    memory = store.MemoryStore(2)
    dog = Watchdog(FakeWorld(rank, 2), store.LocalControlChannel(memory, rank), [beat], 10.0, lambda failure: None)
    with beat.collective("the gradients' all-reduce"):
        clock.pass_seconds(6)
        clock.now += 100000.0
        memory.record_heartbeat(rank, dog.statuses())
        assert dog.look() is None
        assert beat.status(rank, "host").seconds < 7
        clock.pass_seconds(12)
        memory.record_heartbeat(rank, dog.statuses())
        failure = dog.look()
    assert failure is not None and "has waited 18 s in the gradients' all-reduce" in failure.message


def test_who_has_begun_an_operation_and_is_silent_since_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is suspended while it waits itself: it is late nowhere, and the others need it nevertheless."""
    clock = Clock(monkeypatch)
    beat = Heartbeat("CPU", lambda: 7)
    memory = store.MemoryStore(3)
    dog = Watchdog(FakeWorld(0, 3), store.LocalControlChannel(memory, 0), [beat], 10.0, lambda failure: None)
    with beat.collective("the gradients' all-reduce"):
        for second in range(12):
            for rank in (1, 2) if second < 3 else (2,):
                memory.record_heartbeat(rank, [state(rank, 1, "the gradients' all-reduce", second)])
            memory.record_heartbeat(0, dog.statuses())
            clock.pass_seconds(1)
        failure = dog.look()
    assert failure is not None and "for rank 1 on host1, process 101, device 0, which is in iter" in failure.message
    assert "and was last heard of 10 s ago (is it suspended?); look at that process" in failure.message


def test_a_rank_is_named_that_was_suspended_before_it_named_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats begin before the devices are made, and the next one may never come."""
    clock = Clock(monkeypatch)
    beat = Heartbeat("CPU", lambda: 7)
    memory = store.MemoryStore(2)
    dog = Watchdog(FakeWorld(0, 2), store.LocalControlChannel(memory, 0), [beat], 10.0, lambda failure: None)
    memory.join(1, 2, store.Member("host1", "machine", 101))
    memory.record_heartbeat(1, [])
    with beat.collective("the gradients' all-reduce"):
        clock.pass_seconds(12)
        memory.record_heartbeat(0, dog.statuses())
        failure = dog.look()
    assert failure is not None and "for rank 1 on host1, process 101, which is in iteration 0" in failure.message


def test_a_failure_that_others_have_told_meanwhile_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank 0 that was suspended and goes on: rank 1's last heartbeats come before what rank 1 has told the user."""
    memory, failures = store.MemoryStore(2), list[Failure]()
    beats = [Heartbeat("CPU", lambda: 7)]
    dog = Watchdog(FakeWorld(0, 2), store.LocalControlChannel(memory, 0), beats, 10.0, failures.append)
    memory.record_heartbeat(1, [state(1, 1, "the gradients' all-reduce", 20.0)])
    look = dog.look

    def looking() -> Failure | None:
        found = look()
        memory.publish(Failure("rank 1: has waited", reported=True), 1)
        return found

    monkeypatch.setattr(dog, "look", looking)
    dog.start()
    assert eventually(lambda: failures)
    assert (failures[0].message, failures[0].reported) == ("rank 1: has waited", True)
