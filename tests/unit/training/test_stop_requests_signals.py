from __future__ import annotations

import os
import signal

import pytest

from caffepy.training.callback import Action
from caffepy.training.stop_requests import SignalRequests

EFFECTS = {signal.SIGINT: "stop", signal.SIGHUP: "snapshot", signal.SIGTERM: "stop"}


class Recorder:
    """Signals taken over within a `with` block."""

    def __init__(self, **changes: object) -> None:
        self.again = 0
        self.failed = False
        effects = {**EFFECTS, **{getattr(signal, name): effect for name, effect in changes.items()}}
        self.requests = SignalRequests(effects, self._again, lambda: self.failed)  # type: ignore[arg-type]

    def _again(self) -> None:
        self.again += 1

    def __enter__(self) -> Recorder:
        self.requests.install()
        return self

    def __exit__(self, *error: object) -> None:
        self.requests.restore()

    def taken(self) -> list[Action]:
        actions = []
        while (action := self.requests()) is not Action.NONE:
            actions.append(action)
        return actions


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGINT, [Action.STOP]),
        (signal.SIGHUP, [Action.SNAPSHOT]),
        (signal.SIGTERM, [Action.SNAPSHOT, Action.STOP]),
    ],
)
def test_signals_ask_as_caffe_does_and_sigterm_keeps_the_work(number: signal.Signals, expected: list[Action]) -> None:
    with Recorder() as recorder:
        os.kill(os.getpid(), number)
        assert recorder.taken() == expected
        assert recorder.taken() == []


def test_effects_can_be_exchanged() -> None:
    with Recorder(SIGINT="snapshot", SIGTERM="snapshot") as recorder:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert recorder.taken() == [Action.SNAPSHOT]


def test_a_signal_without_effect_stays_whose_it_was() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Recorder(SIGHUP="none"):
        assert signal.getsignal(signal.SIGHUP) is before
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_ends_at_once() -> None:
    with Recorder() as recorder:
        os.kill(os.getpid(), signal.SIGINT)
        assert recorder.again == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert recorder.again == 1


def test_where_an_interrupt_asks_for_a_snapshot_every_one_does_and_none_ends_the_run() -> None:
    with Recorder(SIGINT="snapshot") as recorder:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            assert recorder.taken() == [Action.SNAPSHOT]
        assert recorder.again == 0


def test_an_interrupt_after_sigterm_asks_for_a_stop_first() -> None:
    with Recorder() as recorder:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert recorder.again == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert recorder.again == 1


def test_after_a_failure_signals_start_nothing() -> None:
    with Recorder() as recorder:
        recorder.failed = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert recorder.taken() == []
