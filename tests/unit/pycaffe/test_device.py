"""The settings of the process (device, seed, rank, log), and the Timer."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import nullcontext

import pytest

from caffepy import pycaffe as caffe
from caffepy.errors import DeviceError
from caffepy.pycaffe import device as timer
from caffepy.pycaffe.device import Mode, Timer, mode
from caffepy.utils.installation import MissingExtraError


def test_devices(net_file, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode.present_device().backend.name == "cpu"
    caffe.set_device(3)
    assert mode.present_device().backend.name == "cpu"  # a number alone chooses no GPU
    caffe.set_mode_gpu()
    assert (mode.gpu, mode.device) == (True, 3)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises((DeviceError, MissingExtraError), match="CuPy|GPU 3 was asked for"):  # has CuPy been imported?
        caffe.Net(net_file, caffe.TEST)
    caffe.set_mode_cpu()
    first, second = mode.present_device(), mode.present_device()
    assert first.backend is not second.backend and first.arrays is second.arrays
    caffe.set_devices([1, 2])
    assert (mode.gpu, mode.device) == (True, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: caffe.set_device(-1), r"set_device\(-1\): give a number of 0 or more"),
        (lambda: caffe.set_devices([]), r"set_devices\(\[\]\): give the number of at least one GPU"),
        (lambda: caffe.set_random_seed(-1), r"set_random_seed\(-1\): give a number of 0 or more"),
        (lambda: caffe.set_solver_count(0), r"set_solver_count\(0\): give a number of 1 or more"),
        (lambda: caffe.set_math("half"), r"set_math\('half'\): give one of fp32, tf32"),
        (lambda: caffe.set_solver_rank(-2), r"set_solver_rank\(-2\): give a number of 0 or more"),
    ],
)
def test_mistakes(call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


def test_products_are_rounded_as_in_training_unless_a_script_wants_them_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int | None, str]] = []
    monkeypatch.setattr("caffepy.pycaffe.device.device_of", lambda number, math="": made.append((number, math)))
    caffe.set_mode_gpu()
    mode.present_device()
    caffe.set_math("fp32")
    mode.present_device()
    assert made == [(mode.device, "tf32"), (mode.device, "fp32")]


def test_processes() -> None:
    assert (caffe.solver_count(), caffe.solver_rank()) == (1, 0)
    caffe.set_solver_count(4)
    caffe.set_solver_rank(2)
    assert (caffe.solver_count(), caffe.solver_rank()) == (4, 2)
    assert mode.shard().world_size == 1
    caffe.set_multiprocess(True)
    assert (mode.shard().rank, mode.shard().world_size, mode.shard(caffe.TEST).world_size) == (2, 4, 1)


def test_log(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("caffepy")
    level, propagate = package.level, package.propagate
    try:
        caffe.init_log()
        caffe.log("hello")
        caffe.init_log(1)
        caffe.log("quiet")
        caffe.init_log(0, False)
        caffe.log("gone")
    finally:
        caffe.init_log(0, False)
        package.setLevel(level)
        package.propagate = propagate
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and re.fullmatch(r"I.* test_device\.py:\d+\] hello", shown[0]), shown


# -- the Timer, on the host and on a device that reports its own time ------------------------------------


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
