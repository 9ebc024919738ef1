from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.cli import devices
from caffepy.errors import ConfigError
from caffepy.parallel.processes.gpu_assignment import own_part, refuse_shared, share_gpus
from caffepy.parallel.processes.world import SingleProcess

T = TypeVar("T")


class ThreadWorld(SingleProcess):
    """A rank that is a thread."""

    def __init__(self, rank: int, machines: list[str], table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(machines)
        self.machines, self.hosts = machines, [f"host-{machine}" for machine in machines]
        self._table, self._barrier = table, barrier

    def all_gather(self, value: T) -> list[T]:
        self._table[self.rank] = value
        self._barrier.wait(300)
        gathered = list(self._table)
        self._barrier.wait(300)
        return gathered


def on_all(machines: list[str], action: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `action` returns, or raises, on each rank."""
    table: list[Any] = [None] * len(machines)
    results: list[Any] = [None] * len(machines)
    barrier = threading.Barrier(len(machines))

    def run(rank: int) -> None:
        try:
            results[rank] = action(ThreadWorld(rank, machines, table, barrier))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return results


def seen(count: int, machine: str = "") -> list[tuple[int, str]]:
    return [(number, f"{machine}:{number}") for number in range(count)]


@given(st.integers(1, 16), st.integers(1, 16))
def test_parts_are_even_and_disjoint(gpus: int, ranks: int) -> None:
    views = [[f"gpu {i}" for i in range(gpus)]] * ranks
    names = [f"rank {i} on h" for i in range(ranks)]
    if gpus < ranks:
        with pytest.raises(ConfigError, match=rf"^rank 0 on h, .* are {ranks} ranks for {gpus} GPUs: start fewer"):
            own_part(views, 0, names)
        return
    parts = [own_part(views, i, names) for i in range(ranks)]
    assert {len(part) for part in parts} == {gpus // ranks}
    assert len({gpu for part in parts for gpu in part}) == gpus // ranks * ranks


def test_gpus_that_were_dealt_out_are_kept() -> None:
    assert own_part([["a"], ["b"], ["c"]], 1, ["x", "y", "z"]) == ["b"]
    assert own_part([["a", "b"], ["c", "d"]], 1, ["x", "y"]) == ["c", "d"]


@pytest.mark.parametrize("index", [0, 1])
def test_views_that_overlap_are_refused_with_both_ranks(index: int) -> None:
    with pytest.raises(ConfigError, match="^rank 3 and rank 4 both see the GPU at b, but do not see the same"):
        own_part([["a", "b"], ["b", "c"]], index, ["rank 3", "rank 4"])


def test_ranks_of_two_machines_share_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    machines = ["a", "b", "a", "b"]
    assert on_all(machines, lambda world: share_gpus(world, seen(4, machines[world.rank]))) == [
        [0, 1], [0, 1], [2, 3], [2, 3]
    ]  # fmt: skip
    messages = {record.getMessage() for record in caplog.records}
    assert "GPUs of host-a: rank 0 takes 0,1; rank 2 takes 2,3" in messages
    assert not any("stay idle" in message for message in messages)


def test_gpus_left_over_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    assert on_all(["a"] * 3, lambda world: share_gpus(world, seen(4))) == [[0], [1], [2]]
    assert "1 of the 4 GPUs of host-a stay idle: ranks get equal parts" in caplog.text


def test_the_order_of_another_rank_does_not_matter() -> None:
    views = [[(0, "x"), (1, "y")], [(0, "y"), (1, "x")]]
    assert on_all(["a", "a"], lambda world: share_gpus(world, views[world.rank])) == [[0], [0]]


def test_too_few_gpus_are_one_error() -> None:
    root, other = on_all(["a", "a"], lambda world: share_gpus(world, seen(1)))
    assert isinstance(root, ConfigError) and "rank 0 on host-a, rank 1 on host-a are 2 ranks for 1 GPUs" in str(root)
    assert isinstance(other, SystemExit) and other.code == 2


@pytest.mark.parametrize(
    ("size", "gpus", "cpu", "gpu_mode", "shares"),
    [
        (None, None, False, True, False),
        ("1", None, False, True, False),
        ("2", None, False, True, True),
        ("2", [0], False, True, False),
        ("2", None, True, True, False),
        ("2", None, False, False, False),
    ],
)
def test_only_launched_ranks_without_named_gpus_share(
    monkeypatch: pytest.MonkeyPatch, size: str | None, gpus: list[int] | None, cpu: bool, gpu_mode: bool, shares: bool
) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    if size is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    asked: list[Any] = []
    monkeypatch.setattr(devices, "check_gpus", lambda wanted: asked.append(wanted) or [7])
    args = argparse.Namespace(gpus=gpus, cpu=cpu)
    assert devices.shares_gpus(args, gpu_mode) == shares
    found = devices.train_devices(args, gpu_mode, 3, "solver.prototxt")
    if cpu or not gpu_mode:
        assert (found, asked) == (None, [])
    else:
        assert (found, asked) == ([7], [gpus or ("all" if shares else [3])])


def test_a_gpu_that_two_ranks_name_is_refused_with_both() -> None:
    machines = ["a", "b", "b"]
    own = [["x"], ["x", "y"], ["z", "y"]]
    root, *others = on_all(machines, lambda world: refuse_shared(world, own[world.rank]))
    assert isinstance(root, ConfigError)
    assert str(root) == (
        "rank 1 on host-b and rank 2 on host-b both train on the GPU at y: give each rank GPUs of its own with --gpu"
    )
    assert [type(other) for other in others] == [SystemExit] * 2
    assert on_all(machines, lambda world: refuse_shared(world, [str(world.rank)])) == [None] * 3


def test_containers_of_one_machine_have_the_same_gpus() -> None:
    containers, machines = ["boot/net1", "boot/net2"], ["boot1/net", "boot2/net"]
    root, _ = on_all(containers, lambda world: refuse_shared(world, ["x"]))
    assert "both train on the GPU at x" in str(root)
    assert on_all(machines, lambda world: refuse_shared(world, ["x"])) == [None] * 2
    assert on_all(containers, lambda world: share_gpus(world, seen(4))) == [[0, 1], [2, 3]]
    assert on_all(machines, lambda world: share_gpus(world, seen(4))) == [[0, 1, 2, 3]] * 2
