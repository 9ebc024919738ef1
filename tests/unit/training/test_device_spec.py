"""What this process's devices are called, and what each of them takes."""

from __future__ import annotations

import socket

import pytest
from fake_world import FakeWorld

from caffepy.data.sharding import Shard
from caffepy.distributed.device_threads import DeviceSpec, device_names, device_specs
from caffepy.distributed.placement import Cores

CORES = Cores((0, 1, 2, 3, 4), 5)


@pytest.mark.parametrize(("threads", "expected"), [(None, 2), (7, 7)])
def test_cpu_solvers_divide_the_cores_of_their_rank(threads: int | None, expected: int) -> None:
    specs = device_specs(FakeWorld(3, 1), [None] * 2, CORES, threads, per_device_batch=True)
    assert specs == [
        DeviceSpec(0, None, "CPU 0", expected, Shard(2, 6, 2, True)),
        DeviceSpec(1, None, "CPU 1", expected, Shard(3, 6, 2, True)),
    ]


def test_gpus_leave_the_number_of_threads_to_their_backend() -> None:
    (spec,) = device_specs(FakeWorld(), [3], CORES, 7)
    assert spec == DeviceSpec(0, 3, "3", None, Shard(0, 1, 1))
    assert spec.full_name == f"rank 0 on {socket.gethostname()}: GPU 3"


def test_there_is_a_thread_for_each_of_many_solvers() -> None:
    specs = device_specs(FakeWorld(), [None] * 9, CORES)
    assert {spec.threads for spec in specs} == {1}


def test_messages_name_rank_and_device_as_far_as_there_are_several() -> None:
    alone = device_specs(FakeWorld(), [None], CORES)
    assert device_names(FakeWorld(), alone) == ["device CPU"]
    world = FakeWorld(2, answer=lambda rank, labels: ["4"])
    assert device_names(world, alone) == ["rank 0 on h0, device CPU", "rank 1 on h1, device 4"]
    assert alone[0].full_name.endswith(": CPU")
