"""Which communicator connects which devices."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_world import FakeWorld

from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator
from caffepy.distributed.connect import DeviceCommunicators
from caffepy.utils.installation import MissingExtraError


class ConnectedWorld(FakeWorld):
    """Ranks with connections, which are counted.

    Args:
        hosts: how many the ranks are on.
    """

    def __init__(self, size: int, rank: int = 0, hosts: int = 1) -> None:
        super().__init__(size, rank)
        self.machines = [f"m{i % hosts}" for i in range(size)]
        self.made = 0

    def communicator(self) -> Any:
        self.made += 1
        return SimpleNamespace(rank=self.rank, size=self.size)


class Nccl:
    """Keeps what it is made of."""

    def __init__(self, size: int, unique_id: Any, rank: int, host: Any, compress: str = "none") -> None:
        self.size, self.unique_id, self.rank, self.host, self.compress = size, unique_id, rank, host, compress


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Takes the place of the module that needs CuPy."""
    module = ModuleType("caffepy.distributed.communicators.nccl")
    module.__dict__.update(NcclCommunicator=Nccl, check_nccl=lambda: None, new_unique_id=lambda: "the id")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")  # the user's own, which stays
    return module


def test_threads_of_one_process_share_a_group() -> None:
    connect = DeviceCommunicators(FakeWorld(), 2, on_gpus=False, timeout=300).connect
    first, second = connect(0), connect(1)
    assert isinstance(first, LocalCommunicator) and isinstance(second, LocalCommunicator)
    assert (first.rank, second.rank, first.size) == (0, 1, 2)
    assert first.group is second.group


@pytest.mark.parametrize(
    ("hosts", "compression", "made"), [(1, "none", 3), (2, "none", 1), (1, "fp16", 1), (2, "bf16", 1)]
)
def test_ranks_of_one_host_share_memory_unless_they_compress(hosts: int, compression: str, made: int) -> None:
    world = ConnectedWorld(2, rank=1, hosts=hosts)
    communicator = DeviceCommunicators(world, 3, on_gpus=False, timeout=300, compress=compression).connect(2)
    assert isinstance(communicator, HierarchicalCommunicator)
    assert (communicator.rank, communicator.size) == (5, 6)
    assert world.made == made
    assert communicator.compresses == (compression != "none")


@pytest.mark.parametrize(("size", "count"), [(1, 2), (2, 1)])
def test_gpus_are_connected_by_nccl_over_the_host(nccl: ModuleType, size: int, count: int) -> None:
    world = FakeWorld() if size == 1 else ConnectedWorld(size)
    communicator: Any = DeviceCommunicators(world, count, on_gpus=True, timeout=300, compress="fp16").connect(count - 1)
    assert isinstance(communicator, Nccl)
    assert (communicator.size, communicator.rank, communicator.unique_id) == (2, count - 1, "the id")
    assert isinstance(communicator.host, LocalCommunicator if size == 1 else HierarchicalCommunicator)
    assert communicator.compress == "fp16"


def test_a_single_gpu_needs_no_nccl(nccl: ModuleType) -> None:
    assert isinstance(DeviceCommunicators(FakeWorld(), 1, on_gpus=True, timeout=300).connect(0), LocalCommunicator)


def test_only_the_root_makes_the_unique_id(nccl: ModuleType) -> None:
    nccl.__dict__["new_unique_id"] = lambda: pytest.fail("another rank has made an id")
    world = ConnectedWorld(2, rank=1)
    answers = iter([None, "the root's"])  # it has no error, and hands out its id
    world.answer = lambda rank, value: next(answers)
    communicator: Any = DeviceCommunicators(world, 1, on_gpus=True, timeout=300).connect(0)
    assert communicator.unique_id == "the root's"


def test_a_missing_nccl_is_said_before_any_thread_connects(nccl: ModuleType) -> None:
    def refuse() -> None:
        raise MissingExtraError("CuPy", "to train on GPUs", "cuda")

    nccl.__dict__["check_nccl"] = refuse
    with pytest.raises(MissingExtraError, match="CuPy"):
        DeviceCommunicators(FakeWorld(), 2, on_gpus=True, timeout=300)


@pytest.mark.parametrize(("size", "count", "says"), [(1, 1, True), (1, 2, True), (2, 1, False)])
def test_compression_that_changes_nothing_is_said(
    caplog: pytest.LogCaptureFixture, size: int, count: int, says: bool
) -> None:
    with caplog.at_level(logging.INFO):
        world = FakeWorld() if size == 1 else ConnectedWorld(size)
        DeviceCommunicators(world, count, on_gpus=False, compress="fp16")
    assert ("--compression fp16 changes nothing: there is no other rank to send" in caplog.text) == says
