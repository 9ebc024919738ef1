"""CUDA is started beside imports: once, in threads, and where it fails nobody is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.cli import train
from caffepy.training import early_cuda, early_libraries


class Driver:
    """libcuda.so.1 as ctypes shows it.

    Args:
        status: what cuInit gives.
    """

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[Any] = []
        self.threads: set[str] = set()

    def cuInit(self, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.threads.add(threading.current_thread().name)
        self.calls.append("init")
        return self.status

    def cuDeviceGet(self, number: Any, device: int) -> int:  # noqa: N802
        number._obj.value = 100 + device
        return 0 if device < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:  # noqa: N802
        self.calls.append(number.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(early_cuda, "load_library", lambda name: found)
    monkeypatch.setattr(early_libraries, "begin", lambda: None)
    early_cuda.begin_driver.cache_clear()
    early_cuda.begin_context.cache_clear()
    yield found
    early_cuda.begin_driver.cache_clear()
    early_cuda.begin_context.cache_clear()


def wait_for(*devices: int) -> None:
    for thread in (early_cuda.begin_driver(), *map(early_cuda.begin_context, devices)):
        thread.join(300)
        assert not thread.is_alive()


def contexts(driver: Driver) -> list[int]:
    return sorted(call for call in driver.calls if call != "init")


def test_each_context_is_made_once_in_a_thread(driver: Driver) -> None:
    early_cuda.begin()
    early_cuda.begin([0, 1])
    early_cuda.begin([1, 0])
    wait_for(0, 1)
    assert contexts(driver) == [100, 101]
    assert driver.threads == {"start CUDA", "start GPU 0", "start GPU 1"}


def test_failures_are_left_to_those_who_need_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    early_cuda.begin([7])
    wait_for(7)
    assert contexts(driver) == [], "there is no such device"
    driver.status = 100
    early_cuda.begin([0])
    wait_for(0)
    assert contexts(driver) == [], "the driver does not start"

    def absent(name: str) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(early_cuda, "load_library", absent)
    early_cuda.begin([1])
    wait_for(1)


@pytest.mark.parametrize(
    ("gpus", "cpu", "device", "launched", "expected"),
    [
        ([0, 1], False, None, False, [100, 101]),
        ([0, 1], False, None, True, []),
        ("all", False, None, False, []),
        (None, False, 1, False, [101]),
    ],
)
def test_train_starts_what_it_knows_that_it_takes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, gpus: Any, cpu: bool, device: int | None, launched: bool,
    expected: list[int],
) -> None:  # fmt: skip
    launcher = "caffepy.parallel.processes.launcher.find_launcher"
    monkeypatch.setattr(launcher, lambda: SimpleNamespace(size=2) if launched else None)
    train._begin_cuda(SimpleNamespace(gpus=gpus, cpu=cpu), device)  # type: ignore[arg-type]
    wait_for(*(number - 100 for number in expected))
    assert contexts(driver) == expected
    assert "init" in driver.calls


@pytest.mark.parametrize(("gpus", "cpu", "device"), [(None, True, 0), (None, False, None)])
def test_the_cpu_needs_none(driver: Driver, gpus: Any, cpu: bool, device: int | None) -> None:
    train._begin_cuda(SimpleNamespace(gpus=gpus, cpu=cpu), device)  # type: ignore[arg-type]
    assert driver.calls == []
    assert early_cuda.begin_driver.cache_info().currsize == 0
