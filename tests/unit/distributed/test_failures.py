"""Who failed first, who prints it, who is told, and how the process ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_world import FakeWatchdog, FakeWorld

from caffepy.distributed import failures as module
from caffepy.distributed.device_threads import DeviceThreads
from caffepy.distributed.failures import Failures
from caffepy.distributed.store.wire import Failure
from caffepy.errors import AbortedError, ConfigError, NonFiniteError, PeerError, RunError


class Threads(DeviceThreads[Any]):
    """Counts what is asked of it."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.extend([None] * count)
        self.aborts = 0
        self.joins: list[float] = []

    def abort(self) -> None:
        self.aborts += 1

    def join(self, seconds: float) -> None:
        self.joins.append(seconds)


class Watchdog(FakeWatchdog):
    """`answer` is what happens when it has told."""

    def __init__(self, answer: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.answer = answer

    def tell_failure(self, failure: Failure) -> None:
        super().tell_failure(failure)
        self.answer()


def make(size: int = 1, rank: int = 0, devices: int = 1) -> tuple[Failures, FakeWorld, Threads]:
    world, threads = FakeWorld(size, rank), Threads(devices)
    return Failures(world, threads), world, threads


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]


def test_the_first_failure_is_kept_and_releases_the_threads_once() -> None:
    failures, _, threads = make(devices=2)
    assert not failures.failed
    failures.raise_first()
    failures.device_failed(RunError("first"), "device CPU 1, iteration 3")
    failures.device_failed(RunError("second"), "device CPU 0, iteration 3")
    assert failures.failed and threads.aborts == 1
    with pytest.raises(RunError, match="^device CPU 1, iteration 3: first$"):
        failures.raise_first()


@pytest.mark.parametrize(
    ("size", "devices", "error", "kind", "message"),
    [
        (1, 1, ConfigError("wrong"), ConfigError, "^wrong$"),
        (1, 1, ValueError("wrong"), ValueError, "^wrong$"),
        (1, 2, ConfigError("wrong"), ConfigError, "^here: wrong$"),
        (1, 2, ValueError("wrong"), RunError, "^here: ValueError: wrong$"),
        (2, 1, ConfigError("wrong"), PeerError, "^rank 0 on h0, here: wrong$"),
        (2, 1, NonFiniteError("the loss is nan", 5), PeerError, "^rank 0 on h0, here: the loss is nan$"),
        (
            1,
            1,
            AbortedError("released"),
            AbortedError,
            r"^training was stopped, and no device said why \(released\); go",
        ),
    ],
)
def test_what_the_main_thread_raises(
    size: int, devices: int, error: Exception, kind: type[Exception], message: str
) -> None:
    failures, _, _ = make(size, devices=devices)
    failures.device_failed(error, "here" if size * devices > 1 else "")
    with pytest.raises(kind, match=message):
        failures.raise_first()


def test_a_single_process_ends_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, threads = make()
    failures.end(RunError("broken"))
    assert world.ended == [] and errors(caplog) == []
    assert threads.aborts == 1 and threads.joins == [2.0]


def test_what_all_ranks_agreed_on_ends_none_of_them(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, threads = make(2)
    world.ended_together = True
    failures.end(ConfigError("ranks differ"))
    assert world.ended == [] and errors(caplog) == [] and threads.joins == [2.0]


@pytest.mark.parametrize("verbose", [False, True])
def test_the_root_prints_its_error_tells_the_others_and_ends_the_world(
    caplog: pytest.LogCaptureFixture, verbose: bool
) -> None:
    failures, world, _ = make(2)
    failures.verbose = verbose
    watchdog = Watchdog()
    failures.watch(watchdog)
    failures.end(ConfigError("broken"))
    failures.close()
    assert errors(caplog) == ["rank 0 on h0: broken"]
    assert bool(caplog.records[0].exc_info) == verbose
    assert [(failure.message, failure.reported) for failure in watchdog.told] == [("rank 0 on h0: broken", True)]
    assert world.ended == [ConfigError.exit_status] and watchdog.log == ["start", "stop"]


def test_another_rank_leaves_the_printing_to_the_root(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, _ = make(2, rank=1)
    answer = Failure("rank 1 on h1: broken", reported=True)

    def hear() -> None:
        threading.Thread(target=failures.peer_failed, args=(answer,), daemon=True).start()

    watchdog = Watchdog(hear)
    failures.watch(watchdog)
    failures.end(RunError("broken"))
    assert errors(caplog) == [] and world.ended == [RunError.exit_status]
    assert [failure.reported for failure in watchdog.told] == [False]


def test_a_rank_prints_its_error_where_the_root_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, _ = make(2, rank=1)
    watchdog = Watchdog()
    failures.watch(watchdog)
    failures.end(RunError("broken"))
    assert errors(caplog) == ["rank 1 on h1: broken"] and world.ended == [RunError.exit_status]
    assert [failure.reported for failure in watchdog.told] == [False, True]


@pytest.mark.parametrize("reported", [False, True])
def test_what_the_watchdog_found_is_printed_once_and_ends_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    monkeypatch.setattr(module, "_LAST_RESORT_SECONDS", 0.05)
    failures, world, threads = make(2)
    watchdog = Watchdog()
    failures.watch(watchdog)
    failures.peer_failed(Failure("rank 1 on h1 is gone", 3, reported=reported))
    assert errors(caplog) == ([] if reported else ["rank 1 on h1 is gone"])
    assert len(watchdog.told) == (0 if reported else 1) and threads.aborts == 1
    with pytest.raises(PeerError, match="^rank 1 on h1 is gone$"):
        failures.raise_first()
    deadline = time.monotonic() + 300.0
    while not world.ended and time.monotonic() < deadline:  # the last resort, if the main thread is stuck
        time.sleep(0.01)
    assert world.ended == [3]
    failures.end(PeerError("the world broke"))
    assert world.ended == [3, 3] and len(errors(caplog)) == (0 if reported else 1)


def test_a_failure_is_not_printed_after_another_rank_has_printed_one(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, _ = make(2)
    watchdog = Watchdog()
    failures.watch(watchdog)
    failures.device_failed(PeerError("the connection broke"), "")
    failures.peer_failed(Failure("rank 1 on h1: broken", 3, reported=True))
    failures.end(PeerError("the connection broke"))
    assert errors(caplog) == [] and watchdog.told == [] and world.ended == [PeerError.exit_status]


def test_a_second_interrupt_ends_the_world_at_once(caplog: pytest.LogCaptureFixture) -> None:
    failures, world, _ = make(2)
    watchdog = Watchdog()
    failures.watch(watchdog)
    failures.interrupted_again()
    assert errors(caplog) == ["interrupted again: ending at once"] and world.ended == [130]
    assert [(failure.status, failure.reported) for failure in watchdog.told] == [(130, True)]


def test_a_watchdog_that_hangs_does_not_hold_up_a_second_interrupt() -> None:
    failures, world, _ = make(2)
    failures.watch(Watchdog(lambda: time.sleep(600.0)))
    begin = time.monotonic()
    failures.interrupted_again()
    assert world.ended == [130] and time.monotonic() - begin < 300.0
