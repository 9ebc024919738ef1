"""Requests among several devices: all act on the same ones in the same iteration, and none is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.training.callback import Action
from caffepy.training.stop_requests import FLAGS, SignalRequests, StopRequests

EFFECTS = {signal.SIGINT: "stop", signal.SIGHUP: "snapshot", signal.SIGTERM: "stop"}


class Device:
    """A device whose signals come when the test says so; it acts as `Solver` does."""

    def __init__(self, alone: bool) -> None:
        self.signals = SignalRequests(EFFECTS, lambda: None, lambda: False)
        self.requests = StopRequests(self.signals, alone)
        self.acted: list[tuple[int, set[Action]]] = []

    def act(self, iteration: int) -> None:
        wanted = {action for action in FLAGS if action in self.requests}
        self.requests.clear()
        if wanted:
            self.acted.append((iteration, wanted))


def ready(flags: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: flags


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]], list[bool]]:
    """Devices, how far answers are behind, each iteration's signals to each device, and where all devices drain."""
    devices, iterations = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    one = st.lists(st.sampled_from([signal.SIGHUP, signal.SIGTERM]), max_size=3)
    each = st.lists(one, min_size=devices, max_size=devices)
    signals = draw(st.lists(each, min_size=iterations, max_size=iterations))
    drained = draw(st.lists(st.booleans(), min_size=iterations, max_size=iterations))
    return devices, draw(st.sampled_from([0, 2])), signals, drained


@settings(max_examples=300)
@given(histories())
def test_every_device_acts_on_the_same_requests_in_the_same_iteration_and_none_is_lost(
    history: tuple[int, int, list[list[list[int]]], list[bool]],
) -> None:
    count, behind, signals, drained = history
    devices = [Device(alone=count == 1) for _ in range(count)]
    asked: list[tuple[int, Action]] = []
    for iteration, (arriving, drains) in enumerate(zip(signals, drained, strict=True)):
        for device, numbers in zip(devices, arriving, strict=True):
            for number in numbers:
                device.signals._handle(number, None)
                asked.append((iteration, Action.SNAPSHOT))
                if number == signal.SIGTERM:
                    asked.append((iteration, Action.STOP))
            device.requests.poll()
        average = np.mean([device.requests.flags() for device in devices], axis=0)
        for device in devices:
            if count > 1:
                device.requests.mark_sent()
                device.requests.expect(ready(average))
            device.requests.receive(behind)
            if drains:  # a test, or a snapshot that is due
                device.requests.receive()
            device.act(iteration)
    for device in devices:
        device.requests.receive()
        device.act(len(signals))
    assert all(device.acted == devices[0].acted for device in devices)
    for when, action in asked:
        latest = when + (behind if count > 1 else 0)
        assert any(when <= i <= latest and action in wanted for i, wanted in devices[0].acted), (when, action)
    for i, wanted in devices[0].acted:
        for action in wanted:
            assert any(when <= i <= when + behind and action is other for when, other in asked), "nobody asked for it"


@pytest.mark.parametrize("alone", [True, False])
def test_many_snapshots_do_not_delay_a_stop(alone: bool) -> None:
    device = Device(alone)
    for number in [signal.SIGHUP] * 5 + [signal.SIGTERM]:
        device.signals._handle(number, None)
    device.requests.poll()
    assert device.requests.flags() == [1.0, 1.0]


def test_what_was_received_before_a_test_is_not_sent_again() -> None:
    """A snapshot that all devices know of, because they drained for a test, is acted on once."""
    requests = StopRequests(None, alone=False)
    requests.expect(ready(np.array([0.0, 0.5])))
    requests.receive()
    assert Action.SNAPSHOT in requests
    assert requests.flags() == [0.0, 0.0]


def test_requests_of_a_device_alone_are_known_at_once() -> None:
    asked = [Action.STOP]
    requests = StopRequests(lambda: asked.pop() if asked else Action.NONE)
    requests.poll()
    assert Action.STOP in requests
