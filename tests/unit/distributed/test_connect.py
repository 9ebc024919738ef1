"""Who makes communicators, which are made, and when."""

from __future__ import annotations

import ast
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from fake_world import FakeWorld
from process_groups import run_threads

import caffepy
from caffepy.distributed import connect as factory
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import AsyncConnector, DeviceCommunicators
from caffepy.distributed.processes.world import SingleProcess
from caffepy.errors import AbortedError, PeerError
from caffepy.utils.installation import MissingExtraError

TRANSPORTS = {"LocalCommunicator", "HierarchicalCommunicator", "NcclCommunicator", "StoreCommunicator"}


class Ranks(SingleProcess):
    """Two ranks whose connections are threads of the test."""

    def __init__(self, rank: int, groups: list[ThreadGroup], local_size: int = 2) -> None:
        super().__init__()
        self.rank, self.size = rank, 2
        self.machines = ["a"] * 2 if local_size == 2 else ["a", "b"]
        self.hosts = ["host"] * 2
        self._groups = iter(groups)

    def communicator(self) -> Communicator | None:
        return LocalCommunicator(next(self._groups), self.rank)

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * 2


def test_nobody_else_makes_transports_of_devices() -> None:
    root = Path(caffepy.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name in ("communicators", "processes") or path.name in ("caffe_pb2.py", "connect.py"):
            continue  # a World connects ranks, connect.py their devices
        found = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)} & TRANSPORTS
        assert not found, f"{path.relative_to(root)} makes {found}: distributed/connect.py does that"


def test_threads_of_one_process_need_no_ranks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        communicators = DeviceCommunicators(SingleProcess(), 2, on_gpus=False, compress="fp16")
    assert [type(communicators.connect(i)) for i in range(2)] == [LocalCommunicator] * 2
    assert caplog.messages == ["--compression fp16 changes nothing: there is no other rank to send gradients to"]


@pytest.mark.parametrize(
    ("local_size", "compress", "in_memory", "overlaps"),
    [(2, "none", True, True), (2, "fp16", False, False), (1, "none", False, True), (1, "bf16", False, True)],
)
def test_ranks_of_one_machine_share_memory_unless_gradients_are_compressed(
    local_size: int, compress: str, in_memory: bool, overlaps: bool
) -> None:
    groups = [ThreadGroup(2, 300) for _ in range(3)]

    def work(rank: int) -> list[Any]:
        communicator = DeviceCommunicators(Ranks(rank, groups, local_size), 1, False, compress).connect(0)
        assert isinstance(communicator, HierarchicalCommunicator)
        memory = communicator.allocate_gradients(100)
        array = np.full(100, rank, np.float32) if memory is None else memory
        array[...] = rank
        communicator.all_reduce(array)
        return [memory is not None, communicator.overlaps, communicator.compresses, array.tolist()]

    assert run_threads(2, work) == [[in_memory, overlaps, compress != "none", [0.5] * 100]] * 2


@pytest.mark.parametrize(("size", "count", "connected"), [(1, 1, False), (1, 2, True), (2, 1, True)])
def test_gpus_are_connected_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int, connected: bool
) -> None:
    monkeypatch.setattr(factory, "_share_unique_id", lambda processes: b"id")
    made: list[tuple[int, int, bytes, str]] = []
    monkeypatch.setattr(
        factory,
        "connect_gpu",
        lambda host, unique_id, compress: made.append((host.rank, host.size, unique_id, compress)),
    )
    world = SingleProcess() if size == 1 else Ranks(1, [ThreadGroup(2)])
    communicators = DeviceCommunicators(world, count, on_gpus=True, compress="fp16")
    for index in range(count):
        communicators.connect(index)
    assert made == [((size - 1) * count + i, size * count, b"id", "fp16") for i in range(count) if connected]


# -- which communicator connects which devices -----------------------------------------------------------


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


# -- communicators that are made while the nets are built ------------------------------------------------


def test_it_is_made_once_in_a_thread_of_its_own() -> None:
    threads = []
    made = MagicMock()

    def connect() -> MagicMock:
        threads.append(threading.current_thread().name)
        return made

    ahead = AsyncConnector(connect, "GPU 1")
    ahead.begin()
    assert ahead() is made
    assert threads == ["connect GPU 1"]


def test_whoever_has_not_begun_makes_it_in_the_caller() -> None:
    assert AsyncConnector(threading.get_ident)() == threading.get_ident()  # type: ignore[arg-type]


def test_its_error_is_raised_by_the_wait() -> None:
    def connect() -> MagicMock:
        raise PeerError("NCCL's connection of the GPUs failed")

    ahead = AsyncConnector(connect)
    ahead.begin()
    with pytest.raises(PeerError, match="NCCL's connection of the GPUs failed"):
        ahead()


def test_the_wait_ends_when_a_peer_failed_and_what_comes_later_is_aborted() -> None:
    peer, aborted, made = threading.Event(), threading.Event(), MagicMock()
    made.abort.side_effect = aborted.set

    def connect() -> MagicMock:
        assert peer.wait(300)
        return made

    ahead = AsyncConnector(connect)
    ahead.begin()
    ahead.give_up()
    with pytest.raises(AbortedError, match="training was stopped"):
        ahead()
    peer.set()
    assert aborted.wait(300)


def test_what_was_made_and_is_given_up_is_aborted() -> None:
    made = MagicMock()
    ahead = AsyncConnector(lambda: made)
    ahead.begin()
    assert ahead() is made
    ahead.give_up()
    made.abort.assert_called_once_with()
