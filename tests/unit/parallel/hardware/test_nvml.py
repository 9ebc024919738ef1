from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_nvml import FakeNvml, pci

from caffepy.parallel.hardware.affinity import bind_near_gpu
from caffepy.parallel.hardware.nvml import Nvml, open_nvml, short_address


def test_cores_near_a_gpu() -> None:
    nvml = Nvml(FakeNvml(cores={pci(0): [0, 1, 63, 64, 130], pci(1): [5]}))
    assert nvml.cores_near("0000:01:00.0") == (0, 1, 63, 64, 130)
    assert nvml.cores_near("0000:02:00.0") == (5,)
    assert nvml.cores_near("0000:99:00.0") == ()


def test_links_and_paths() -> None:
    fake = FakeNvml(links={pci(0): [pci(1), pci(1), None, pci(9)]}, levels={(pci(0), pci(1)): 50})
    nvml = Nvml(fake)
    assert nvml.link_ends(pci(0)) == ["0000:02:00.0", "0000:02:00.0", "0000:0A:00.0"]
    assert nvml.link_ends(pci(1)) == []
    assert nvml.common_ancestor(pci(0), pci(1)) == "SYS"
    assert nvml.common_ancestor(pci(1), pci(0)) == ""
    assert nvml.common_ancestor(pci(0), "0000:99:00.0") == ""


def test_a_function_that_an_old_library_lacks_is_not_known() -> None:
    class Old:
        @staticmethod
        def nvmlDeviceGetHandleByPciBusId_v2(address: Any, device: Any) -> int:
            return 0

    assert Nvml(Old()).cores_near(pci(0)) == ()
    assert Nvml(Old()).link_ends(pci(0)) == []


def test_the_library_is_shut_down() -> None:
    fake = FakeNvml()
    with open_nvml(lambda name: fake) as nvml:
        assert nvml is not None and fake.open == 1
    assert fake.open == 0


def test_no_library_and_no_driver() -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with open_nvml(absent) as nvml:
        assert nvml is None
    with open_nvml(lambda name: FakeNvml(status=9)) as nvml:
        assert nvml is None


def test_addresses_are_written_as_cuda_writes_them() -> None:
    assert short_address("00000000:1b:00.0") == "0000:1B:00.0"
    assert short_address("0000:1B:00.0") == "0000:1B:00.0"


def in_thread(near: list[int]) -> tuple[tuple[int, ...], set[int]]:
    """What a thread was bound to, and what it may use then."""

    @contextmanager
    def library() -> Iterator[Nvml]:
        yield Nvml(FakeNvml(cores={pci(0): near}))

    found: list[Any] = []

    def run() -> None:
        found.append(bind_near_gpu(pci(0), "0", library))
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return found[0], found[1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_thread_stays_near_its_gpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "caffepy")
    before = os.sched_getaffinity(0)
    first = min(before)
    assert in_thread([first, 1000]) == ((first,), {first})
    assert os.sched_getaffinity(0) == before
    assert f"GPU 0 (0000:01:00.0): its thread runs on the CPU cores near it, {first}" in caplog.text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("near", [[], [1000, 1001]], ids=["unknown", "not allowed"])
def test_a_thread_whose_gpu_has_no_core_to_use_stays_free(near: list[int]) -> None:
    assert in_thread(near) == ((), os.sched_getaffinity(0))


def test_without_nvml_nothing_is_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "caffepy")

    @contextmanager
    def absent() -> Iterator[None]:
        yield None

    assert bind_near_gpu(pci(0), "0", absent) == ()
    assert "its thread is not bound; cores near it: ?" in caplog.text
