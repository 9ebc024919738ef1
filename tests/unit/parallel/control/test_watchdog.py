from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import pytest

from caffepy.awake import AwakeClock
from caffepy.parallel.control import watchdog
from caffepy.parallel.control.failure import Failure
from caffepy.parallel.control.lifeline import Event, Hub, Lifeline, Spoke
from caffepy.parallel.control.watchdog import DeviceState, Progress, Watchdog, find_stall
from caffepy.parallel.processes.world import World


def state(rank: int, collectives: int, waiting: str = "", seconds: float = 0.0, iteration: int = 5) -> DeviceState:
    return DeviceState(rank, f"host{rank}", 100 + rank, "0", iteration, collectives, waiting, seconds)


class FakeWorld(World):
    """A rank among several, without MPI."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.hosts = [f"host{i}" for i in range(size)]


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether a condition comes true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_nobody_stalls_while_waits_are_short() -> None:
    assert find_stall([state(0, 3, "a barrier", 9.0), state(1, 2, "", 9.0)], 10.0) is None


def test_a_long_computation_alone_is_no_stall() -> None:
    assert find_stall([state(0, 3, "", 1000.0)], 10.0) is None


def describe(*states: DeviceState) -> str:
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


def test_the_furthest_behind_is_named_among_several() -> None:
    message = describe(state(0, 9, "x", 20.0), state(1, 8, "y", 20.0), state(2, 5))
    assert "for rank 2 on" in message and "since 0 s, and for 1 more;" in message


def test_all_waiting_in_the_same_operation_is_nobodys_fault() -> None:
    assert "for nobody knows whom;" in describe(state(0, 9, "x", 20.0), state(1, 9, "x", 20.0))


def reader(seconds: float) -> DeviceState:
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
    progress = Progress("0", lambda: iterations[0], begun=False)
    assert progress.state(World()).starting
    iterations[0] = 500  # a snapshot
    progress.begin()
    assert progress.state(World()).starting
    iterations[0] = 501
    assert not progress.state(World()).starting


def test_an_operation_that_goes_on_says_how_far_it_has_come() -> None:
    parts = iter(("part 1", "part 2"))
    progress = Progress("0")
    with progress.waiting(lambda: next(parts)):
        assert [progress.state(FakeWorld(0, 1)).waiting for _ in range(2)] == ["part 1", "part 2"]
    assert progress.state(FakeWorld(0, 1)).waiting == ""


def test_progress_counts_collectives_and_stays_marked_after_an_error() -> None:
    progress = Progress("0", lambda: 3)
    with progress.waiting("a"):
        inside = progress.state(World())
    assert (inside.collectives, inside.waiting, inside.iteration) == (1, "a", 3)
    assert progress.state(World()).waiting == ""
    with pytest.raises(ValueError), progress.waiting("b"):
        raise ValueError
    assert (progress.state(World()).collectives, progress.state(World()).waiting) == (2, "b")


class Group:
    """Ranks of one process, joined by a real lifeline."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        hub = Hub(several_hosts=False)
        lines: list[Lifeline] = [hub, *(Spoke(hub.address, rank, same_host=True) for rank in range(1, size))]
        self.lines = lines
        self.progresses = [Progress("CPU", lambda: 7) for _ in range(size)]
        self.failures: list[list[Failure]] = [[] for _ in range(size)]
        self.dogs = [
            Watchdog(FakeWorld(i, size), lines[i], [self.progresses[i]], timeout, partial(self.fail, i))
            for i in range(size)
        ]
        for dog in self.dogs:
            dog.start()
        # Rank 0 has to know all ranks before it can miss one.
        assert eventually(lambda: set(self.dogs[0]._others) == set(range(1, size)))

    def fail(self, rank: int, failure: Failure) -> None:
        """What a manager does with a failure."""
        self.failures[rank].append(failure)
        if rank == 0 and not failure.reported:
            self.dogs[0].tell_failure(failure)

    def kill(self, rank: int) -> None:
        """Close a rank's connections as its kernel would, without a good-bye."""
        line = self.lines[rank]
        for connection in [line._line] if isinstance(line, Spoke) else [*line._lines, line._server]:
            getattr(connection, "socket", connection).shutdown(2)


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int, timeout: float = 60.0) -> Group:
        made.append(Group(size, timeout))
        return made[-1]

    yield make
    for one in made:
        for dog in one.dogs:
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
        with two.progresses[1 - sleeper].waiting("the gradients' all-reduce"):
            done.wait(20)

    threading.Thread(target=wait, daemon=True).start()
    assert eventually(lambda: two.failures[0])
    done.set()
    assert f"for rank {sleeper} on host{sleeper}, process" in two.failures[0][0].message


def test_strangers_are_shown_the_door(group: Callable[..., Group]) -> None:
    two = group(2)
    hub = two.lines[0]
    assert isinstance(hub, Hub)
    hosts, port, _ = hub.address
    stranger = Spoke((hosts, port, "wrong"), 1, same_host=True)
    assert [event.kind for event in stranger.poll(5.0)] == ["lost"]
    assert two.failures == [[], []]


class Clock:
    """Plays `awake_seconds`, for all processes of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._clock = AwakeClock(lambda: self.now)
        monkeypatch.setattr(watchdog, "awake_seconds", self._clock.read)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self._clock.read()


def alone(rank: int, size: int, progress: Progress, timeout: float) -> Watchdog:
    """A watchdog that is asked to look by the test and whose process has no connection to others."""
    return Watchdog(FakeWorld(rank, size), Lifeline(), [progress], timeout, lambda failure: None)


@pytest.mark.parametrize("rank", [0, 1])
def test_time_of_suspension_is_no_waiting(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    clock = Clock(monkeypatch)
    progress = Progress("CPU", lambda: 7)
    dog = alone(rank, 2, progress, 10.0)
    with progress.waiting("the gradients' all-reduce"):
        clock.pass_seconds(6)
        clock.now += 100000.0
        assert dog._look() is None
        assert progress.state(FakeWorld(rank, 2)).seconds < 7
        clock.pass_seconds(12)
        failure = dog._look()
    assert failure is not None and "has waited 18 s in the gradients' all-reduce" in failure.message


def test_who_has_begun_an_operation_and_is_silent_since_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is suspended while it waits itself: it is late nowhere, and the others need it nevertheless."""
    clock = Clock(monkeypatch)
    progress = Progress("CPU", lambda: 7)
    dog = alone(0, 3, progress, 10.0)
    with progress.waiting("the gradients' all-reduce"):
        for second in range(12):
            for rank in (1, 2) if second < 3 else (2,):
                state = DeviceState(rank, f"host{rank}", 100 + rank, "0", 7, 1, "the gradients' all-reduce", second)
                dog._failure(Event("states", rank, {"devices": [asdict(state)]}))
            clock.pass_seconds(1)
        failure = dog._look()
    assert failure is not None
    assert "for rank 1 on host1, process 101, which was last heard of 10 s ago (is it suspended?);" in failure.message
