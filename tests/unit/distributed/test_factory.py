"""Who makes communicators, and which are made."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_groups import run_threads

import caffepy
from caffepy.distributed import connect as factory
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import DeviceCommunicators
from caffepy.distributed.processes.world import SingleProcess

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
