"""The Timer on the host, and on a device that reports its own time."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from caffepy.pycaffe import device as timer
from caffepy.pycaffe.device import Mode, Timer


def test_milliseconds_between_start_and_stop():
    begin, watch = time.perf_counter(), Timer()
    watch.start()
    time.sleep(0.02)
    watch.stop()
    first = watch.ms
    assert 20 <= first <= 1000 * (time.perf_counter() - begin)
    time.sleep(0.01)
    assert watch.ms == first
    begin = time.perf_counter()
    watch.start()
    assert watch.ms <= 1000 * (time.perf_counter() - begin)  # reading stops it


def test_a_running_timer_goes_on():
    watch = Timer()
    watch.start()
    time.sleep(0.02)
    watch.start()
    assert watch.ms >= 20


def test_a_timer_that_never_ran(caplog):
    watch = Timer()
    watch.stop()
    assert watch.ms == 0
    assert "a Timer that was never started has no time" in caplog.text


class _Event:
    def __init__(self, seconds):
        self.seconds = seconds

    def seconds_since(self, earlier):
        return self.seconds - earlier.seconds


class _Backend:
    clock = 0.0
    active = 0

    def activate(self):
        self.active += 1
        return nullcontext()

    def record_timed_event(self):
        _Backend.clock += 1.5
        return _Event(_Backend.clock)


def test_on_a_gpu_the_devices_events_are_read(monkeypatch):
    backend = _Backend()
    mode = Mode(gpu=True)
    monkeypatch.setattr(timer, "mode", mode)
    monkeypatch.setattr(Mode, "present_device", lambda self: type("Device", (), {"backend": backend}))
    watch = Timer()
    watch.start()
    watch.stop()
    assert watch.ms == pytest.approx(1500)
    assert backend.active == 2
