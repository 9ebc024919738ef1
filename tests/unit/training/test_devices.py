from __future__ import annotations

import re
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_nccl import run_simulated

from caffepy.cli.main import main
from caffepy.training import devices

CODE = """
import simulated_nccl, caffepy.utils.files
simulated_nccl.install(gpus=0)
def load_library(path):
    if not {driver}:
        raise OSError(path)
caffepy.utils.files.load_library = load_library
from caffepy.errors import DeviceError
from caffepy.training.devices import check_gpus
try:
    check_gpus([1])
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("driver", "reason"),
    [(False, "this machine has no NVIDIA driver"), (True, r"CUDA finds none here \(no device is visible; .*\)")],
)
def test_a_gpu_is_wanted_where_there_is_none(driver: bool, reason: str) -> None:
    (line,) = run_simulated(CODE.format(driver=driver))
    assert re.match(rf"GPU 1 was asked for, and {reason}: train on the CPU with --cpu, or install the driver", line)


class Driver:
    """libcuda.so.1 as ctypes shows it, on a machine with two GPUs.

    Args:
        status: what cuInit gives.
    """

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.contexts: list[int] = []
        self.threads: set[threading.Thread] = set()

    def cuInit(self, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.threads.add(threading.current_thread())
        return self.status

    def cuDeviceGet(self, number: Any, device: int) -> int:  # noqa: N802
        number._obj.value = 100 + device
        return 0 if device < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:  # noqa: N802
        self.contexts.append(number.value)
        return 0


class Manager:
    """A P2PManager that reads the options and trains nothing."""

    def __init__(self, options: Callable[[], Any], on_begin: Any) -> None:
        self.run = options


def wait_for_preload() -> None:
    for thread in threading.enumerate():
        if thread.name == "start CUDA":
            thread.join(300)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("status", "wanted", "expected"), [(0, [0, 1], [100, 101]), (0, [7], []), (0, [], []), (100, [0], [])]
)
def test_contexts_are_made_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, status: int, wanted: list[int], expected: list[int]
) -> None:
    driver = Driver(status)
    monkeypatch.setattr(devices, "load_library", lambda name: driver)
    devices.preload_cuda(wanted)
    wait_for_preload()
    assert driver.contexts == expected
    assert driver.threads and threading.current_thread() not in driver.threads


ENGINES = ["libcudnn_engines_precompiled.so.9", "libcudnn_engines_runtime_compiled.so.9"]


@pytest.mark.parametrize(("linked", "engines"), [("", ENGINES), (":{}/other:", ENGINES), (":{}/of_the_system", [])])
def test_cudnns_engines_are_loaded_if_the_frontend_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linked: str, engines: list[str]
) -> None:
    """The frontend prefers a cuDNN of LD_LIBRARY_PATH, which fails beside the engines of another release."""
    for name in ("other", "of_the_system"):
        (tmp_path / name).mkdir()
    (tmp_path / "of_the_system" / "libcudnn.so.9").touch()
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudnn.so.9", *ENGINES):
        (folder / name).touch()
    monkeypatch.setattr(sysconfig, "get_path", {"purelib": str(tmp_path)}.get)
    monkeypatch.setenv("LD_LIBRARY_PATH", linked.format(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr(devices, "load_library", lambda name: loaded.append(name) or Driver())
    devices.preload_cuda([0])
    wait_for_preload()
    assert [Path(name).name for name in loaded] == ["libcuda.so.1", *engines]


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(devices, "load_library", absent)
    devices.preload_cuda([0])
    wait_for_preload()


@pytest.mark.parametrize(
    ("options", "launched", "expected"),
    [
        ("--gpus 0,1", False, [100, 101]),
        ("--gpus 0,1", True, []),  # the ranks divide them
        ("--gpus all", False, []),
        ("", False, [101]),  # the solver's device_id
    ],
)
def test_train_preloads_the_devices_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, options: str, launched: bool, expected: list[int]
) -> None:
    driver = Driver()
    monkeypatch.setattr(devices, "load_library", lambda name: driver)
    launcher = "caffepy.distributed.processes.launcher.find_launcher"
    monkeypatch.setattr(launcher, lambda *_: SimpleNamespace(size=2) if launched else None)
    monkeypatch.setattr("caffepy.training.p2p_manager.P2PManager", Manager)
    (tmp_path / "solver.prototxt").write_text(
        'net: "net.prototxt" solver_mode: GPU device_id: 1 base_lr: 1 lr_policy: "fixed" max_iter: 1\n'
    )
    (tmp_path / "net.prototxt").write_text("")
    main(["train", "--solver", str(tmp_path / "solver.prototxt"), *options.split()])  # ends where CuPy is missing
    wait_for_preload()
    assert driver.contexts == expected
    assert driver.threads


def test_a_cpu_preloads_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(devices, "preload_cuda", lambda found: pytest.fail("it is not wanted"))
    assert main(["train", "--solver", str(tmp_path / "solver.prototxt"), "--cpu"]) == 2  # no such file
