"""Which GPUs and which cores a rank takes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.cli import nets as devices
from caffepy.cli.options import GpuOptions
from caffepy.distributed.placement import (
    Cores,
    GpuClaim,
    bind_near_gpu,
    cores_near,
    format_cores,
    own_part,
    parse_cores,
    share,
    share_gpus,
    take_cores,
)
from caffepy.distributed.processes.world import SingleProcess
from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter

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


def claims(views: Sequence[str], named: bool = True) -> list[GpuClaim]:
    """Ranks of one host, each with the letters of a view as GPUs, numbered from 0 on."""
    return [
        GpuClaim(rank, "h", {letter: number for number, letter in enumerate(view)}, named)
        for rank, view in enumerate(views)
    ]


@given(st.integers(1, 16), st.integers(1, 16), st.booleans())
@settings(deadline=None)
def test_parts_are_equal_and_disjoint(gpus: int, ranks: int, named: bool) -> None:
    view = "".join(chr(ord("a") + number) for number in range(gpus))
    all_claims = claims([view] * ranks, named)
    if gpus < ranks or (named and gpus % ranks):
        with pytest.raises(
            ConfigError, match=rf"^h has {ranks} ranks \(0,1.*\) for {gpus} GPUs? \(0.*\): .*ranks? fit"
        ):
            own_part(all_claims, 0)
        return
    parts = [own_part(all_claims, index) for index in range(ranks)]
    assert {len(part) for part in parts} == {gpus // ranks}
    assert "".join("".join(part) for part in parts) == view[: gpus // ranks * ranks]


@pytest.mark.parametrize(
    ("views", "parts"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        (["ab", "cd"], ["ab", "cd"]),
        (["ab", "ab", "cd", "cd"], ["a", "b", "c", "d"]),
        (["dcba", "abcd"], ["dc", "ba"]),
        (["ab", "c"], ["ab", "c"]),
    ],
)
def test_lists_without_a_common_gpu_are_kept(views: list[str], parts: list[str]) -> None:
    assert ["".join(own_part(claims(views), index)) for index in range(len(views))] == parts


@pytest.mark.parametrize("index", [1, 2])
def test_lists_with_some_gpus_in_common_are_refused_with_both_ranks(index: int) -> None:
    message = r"^rank 1 on h \(GPUs 0,1\) and rank 2 on h \(GPUs 0,1\) have the GPU at b in common, but not all"
    with pytest.raises(ConfigError, match=message):
        own_part(claims(["xy", "ab", "bc"]), index)
    assert own_part(claims(["xy", "ab", "bc"]), 0) == ["x", "y"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "fitting"), [(4, 3, "1, 2 or 4 ranks fit"), (1, 2, "1 rank fits"), (6, 4, "1, 2, 3 or 6 ranks")]
)
def test_the_error_says_how_many_ranks_fit(gpus: int, ranks: int, fitting: str) -> None:
    with pytest.raises(ConfigError, match=fitting):
        own_part(claims(["abcdef"[:gpus]] * ranks), 0)


@pytest.mark.parametrize(
    ("machines", "gpus", "expected"),
    [
        (["a"], 4, [[0, 1, 2, 3]]),
        (["a"] * 2, 4, [[0, 1], [2, 3]]),
        (["a"] * 4, 4, [[0], [1], [2], [3]]),
        (["a", "b"], 4, [[0, 1, 2, 3]] * 2),
        (["a", "a", "b", "b"], 2, [[0], [1], [0], [1]]),
        (["a", "b", "a", "b"], 4, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
    ids=["1x4", "2x4", "4x4", "2 hosts, a rank each", "2 hosts, 2 ranks each", "2 hosts, ranks in turn"],
)
def test_the_ranks_of_a_host_divide_the_list_that_all_name(
    caplog: pytest.LogCaptureFixture, machines: list[str], gpus: int, expected: list[list[int]]
) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    parts = on_all(machines, lambda world: share_gpus(world, seen(gpus, machines[world.rank]), named=True))
    assert parts == expected
    messages = {record.getMessage() for record in caplog.records}
    several = {host for host in machines if machines.count(host) > 1}
    assert len(messages) == len(several)
    for host in several:
        taken = [f"rank {r} takes {','.join(map(str, expected[r]))}" for r, m in enumerate(machines) if m == host]
        assert f"GPUs of host-{host}: {'; '.join(taken)}" in messages


def test_gpus_that_nobody_named_may_be_left_over(caplog: pytest.LogCaptureFixture) -> None:
    assert on_all(["a"] * 3, lambda world: share_gpus(world, seen(4))) == [[0], [1], [2]]
    assert "1 of the 4 GPUs of host-a stay idle: ranks get equal parts" in caplog.text
    root, *_ = on_all(["a"] * 3, lambda world: share_gpus(world, seen(4), named=True))
    assert isinstance(root, ConfigError) and "host-a has 3 ranks (0,1,2) for 4 GPUs (0,1,2,3): 1, 2 or 4" in str(root)


def test_a_gpu_is_known_by_its_identity() -> None:
    """CUDA_VISIBLE_DEVICES numbers the GPUs of each rank anew."""
    views = [[(0, "x"), (1, "y")], [(0, "y"), (1, "x")]]
    assert on_all(["a", "a"], lambda world: share_gpus(world, views[world.rank])) == [[0], [0]]
    dealt_out = [[(0, "x")], [(0, "y")]]
    assert on_all(["a", "a"], lambda world: share_gpus(world, dealt_out[world.rank], named=True)) == [[0], [0]]


def test_two_ranks_with_one_gpu_are_one_error() -> None:
    root, other = on_all(["a", "a"], lambda world: share_gpus(world, seen(1), named=True))
    assert isinstance(root, ConfigError) and "host-a has 2 ranks (0,1) for 1 GPU (0): 1 rank fits" in str(root)
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
    args = GpuOptions(gpus=gpus, cpu=cpu)
    assert devices.shares_gpus(args, gpu_mode) == shares
    found = devices.train_devices(args, gpu_mode, SolverParameter(device_id=3), "solver.prototxt")
    if cpu or not gpu_mode:
        assert (found, asked) == (None, [])
    else:
        assert (found, asked) == ([7], [gpus or ("all" if shares else [3])])


def test_a_list_of_devices_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "check_gpus", lambda wanted: wanted)
    args = GpuOptions(gpus=None, cpu=False)
    assert devices.train_devices(args, True, SolverParameter(device_ids=[0, 2]), "solver.prototxt") == [0, 2]


def test_containers_of_one_machine_have_the_same_gpus() -> None:
    containers, machines = ["boot/net1", "boot/net2"], ["boot1/net", "boot2/net"]
    assert on_all(containers, lambda world: share_gpus(world, seen(4))) == [[0, 1], [2, 3]]
    assert on_all(machines, lambda world: share_gpus(world, seen(4))) == [[0, 1, 2, 3]] * 2


# -- cores -----------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 200)))
def test_core_lists_are_written_as_linux_writes_them(cores: set[int]) -> None:
    ordered = tuple(sorted(cores))
    assert parse_cores(format_cores(ordered)) == ordered


def test_runs_are_joined() -> None:
    assert format_cores((0, 1, 2, 8, 10, 11)) == "0-2,8,10-11"


@given(st.integers(1, 70), st.integers(1, 9))
def test_shares_are_disjoint_and_complete(cores: int, ranks: int) -> None:
    parts = [share(tuple(range(cores)), i, ranks) for i in range(ranks)]
    assert sum(parts, ()) == tuple(range(cores))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_narrowed_process_gets_its_cores_back() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        cores = take_cores(0, 1, divide=True)
        assert set(cores.numbers) == os.sched_getaffinity(0) >= before
        assert 1 <= cores.count <= len(cores.numbers)
    finally:
        os.sched_setaffinity(0, before)


def test_a_quota_limits_the_threads_and_forbids_sharing_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    files, read = {"cpu.max": "400000 100000\n"}, Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: files[path.name] if path.name in files else read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: None, raising=False)
    assert take_cores(1, 2, divide=True) == Cores(tuple(range(8)), 2)
    files["cpu.max"] = "max 100000\n"
    assert take_cores(1, 2, divide=True) == Cores((4, 5, 6, 7), 4)
    assert take_cores(1, 2, divide=False) == Cores(tuple(range(8)), 8)


def linux(folder: Path, near: str) -> Path:
    """What Linux shows of a GPU and the cores near it."""
    device = folder / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{near}\n")
    return folder


def test_cores_near_a_gpu(tmp_path: Path) -> None:
    system = linux(tmp_path, "0-1,63-64,130")
    assert cores_near("0000:1B:00.0", system) == (0, 1, 63, 64, 130)
    assert cores_near("0000:99:00.0", system) == ()


def in_thread(system: Path) -> tuple[tuple[int, ...], set[int]]:
    """What a thread was bound to, and what it may use then."""
    found: list[Any] = []

    def run() -> None:
        found.append(bind_near_gpu("0000:1B:00.0", "0", system))
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    return found[0], found[1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_thread_stays_near_its_gpu(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO", "caffepy")
    before = os.sched_getaffinity(0)
    first = min(before)
    assert in_thread(linux(tmp_path, f"{first},1000")) == ((first,), {first})
    assert os.sched_getaffinity(0) == before
    assert f"GPU 0 (0000:1B:00.0): its thread runs on the CPU cores near it, {first}" in caplog.text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("near", ["", "1000-1001"], ids=["unknown", "not allowed"])
def test_a_thread_whose_gpu_has_no_core_to_use_stays_free(near: str, tmp_path: Path) -> None:
    assert in_thread(linux(tmp_path, near)) == ((), os.sched_getaffinity(0))


def test_where_linux_does_not_say_nothing_is_bound(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("DEBUG", "caffepy")
    assert bind_near_gpu("0000:1B:00.0", "0", tmp_path) == ()
    assert "its thread is not bound; cores near it: ?" in caplog.text
