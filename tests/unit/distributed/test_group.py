from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collectives import Checker
from process_groups import raise_first, run_local, run_tcp

from caffepy.distributed import AVG, ProcessGroup
from caffepy.distributed.default import connect
from caffepy.errors import PeerError, UserError
from caffepy.utils.clocks import suspend_aware_seconds


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    suspend_aware_seconds()  # starts the clock of the process
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 300.0
    while not set(threading.enumerate()) <= before and time.monotonic() < end:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [run_local, run_tcp])
def test_every_operation_against_numpy(run: Any, size: int) -> None:
    checks = raise_first(run(size, lambda group: Checker(group).everything()))
    assert min(checks) > 400


def only(results: list[Any], kind: type[Exception] = PeerError) -> list[str]:
    """The messages of the errors of a kind; other results are none."""
    return [str(result) for result in results if type(result) is kind]


def refused(action: Any, size: int = 2) -> str:
    """The message of the error that rank 0 meets in its arguments."""

    def work(group: ProcessGroup) -> str:
        if group.rank == 0:
            with pytest.raises(UserError) as caught:
                action(group)
            return str(caught.value)
        return ""

    return str(raise_first(run_local(size, work))[0])


def test_numpys_integers_are_ranks_roots_and_tags() -> None:
    def work(group: ProcessGroup) -> list[float]:
        own, other = np.full(1, group.rank, np.float32), np.int64(1 - group.rank)
        received, rows = np.zeros(1, np.float32), np.zeros((2, 1), np.float32)
        sending = group.isend(own, other, np.int64(3))
        group.recv(received, other, np.uint8(3))
        sending.wait()
        group.broadcast(own, np.int32(1))
        group.reduce(own, np.int64(0))
        group.gather(own, rows if group.rank == 1 else None, np.int64(1))
        group.scatter(own, rows if group.rank == 1 else None, np.int16(1))
        return [float(received[0]), float(own[0])]

    for run in (run_local, run_tcp):
        assert raise_first(run(2, work)) == [[1.0, 2.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", ["rank", "world_size", "device_id"])
def test_what_is_no_whole_number_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is '1'; it must be an integer"):
        connect("tcp", "tcp://127.0.0.1:1", **{name: "1"})  # type: ignore[arg-type]


def test_a_group_is_joined_as_rank_int64() -> None:
    with connect("tcp", "tcp://127.0.0.1:1", rank=np.int64(0), world_size=np.int64(1)) as group:
        assert (group.rank, type(group.rank)) == (0, int)


ARRAY = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda g: g.all_reduce([1.0]), r"all_reduce: tensor is a list: pass a NumPy or CuPy array"),
        (lambda g: g.all_reduce(np.zeros(2, np.complex64)), "tensor has dtype complex64; known: float16, float32"),
        (lambda g: g.all_reduce(np.zeros(2, ">f4")), "tensor has dtype >f4"),
        (lambda g: g.all_reduce(np.zeros((4, 4))[:, 0]), "tensor is not contiguous"),
        (lambda g: g.all_reduce(np.zeros((2, 3)).T), "tensor is not contiguous"),
        (lambda g: g.all_reduce(np.frombuffer(b"12345678")), "tensor is read-only"),
        (lambda g: g.all_reduce(np.zeros(2, np.int32), AVG), "AVG of int32 would have to be rounded"),
        (lambda g: g.all_reduce(ARRAY, "sum"), "op is 'sum'; known: SUM, PRODUCT, MIN, MAX, AVG"),
        (lambda g: g.broadcast(ARRAY, 2), "broadcast: group_src 2 is not a rank of this group: ranks are 0 to 1"),
        (lambda g: g.reduce(ARRAY, -1), "reduce: group_dst -1 is not a rank"),
        (lambda g: g.all_gather([ARRAY], ARRAY), "all_gather: tensor_list has 1 arrays; give one for each of 2 ranks"),
        (
            lambda g: g.all_gather([ARRAY, np.zeros(5, np.float32)], ARRAY),
            r"tensor_list\[1\] is float32 \(5,\); it should be float32 \(4,\)",
        ),
        (
            lambda g: g.all_gather([ARRAY, np.zeros(4)], ARRAY),
            r"tensor_list\[1\] is float64 \(4,\); it should be float32 \(4,\)",
        ),
        (
            lambda g: g.all_gather(np.zeros((3, 4), np.float32), ARRAY),
            r"tensor_list is float32 \(3, 4\); it should be float32 \(2, 4\) or \(8,\), or a list of 2 arrays",
        ),
        (lambda g: g.gather(ARRAY), "gather: gather_list is missing on the root, rank 0"),
        (lambda g: g.gather(ARRAY, [ARRAY, ARRAY], group_dst=1), "gather: gather_list is only for the root, rank 1"),
        (lambda g: g.scatter(ARRAY), "scatter: scatter_list is missing on the root, rank 0"),
        (lambda g: g.reduce_scatter(ARRAY, ARRAY), r"reduce_scatter: input_list is float32 \(4,\); it should be"),
        (lambda g: g.all_to_all(ARRAY, np.zeros(3, np.float32)), r"shape \(3,\) cannot be cut into 2 equal parts"),
        (lambda g: g.all_to_all([], []), "all_to_all: input_tensor_list has 0 arrays; give one for each of 2 ranks"),
        (lambda g: g.send(ARRAY, 0), "send: a rank cannot send to itself"),
        (lambda g: g.recv(ARRAY, 2), "receive: rank 2 is not a rank of this group"),
        (lambda g: g.isend(ARRAY, 1, tag=1 << 20), "send: tag 1048576 is not an integer from 0 to 32767"),
        (lambda g: g.irecv(ARRAY, 1, tag=-1), "receive: tag -1 is not an integer"),
    ],
)
def test_arguments_that_cannot_be_are_refused(action: Any, message: str) -> None:
    found = refused(action)
    assert re.search(message, found), found
    assert found.startswith("rank 0 on host (process 100): ")


def test_a_timeout_names_those_who_have_not_come() -> None:
    given_up = threading.Event()

    def work(group: ProcessGroup) -> None:
        group.timeout = 1.0
        if group.rank != 0:
            given_up.wait(300)
            return
        try:
            group.all_reduce(np.zeros(4))
        finally:
            given_up.set()

    messages = only(run_tcp(3, work))
    assert len(messages) >= 1
    assert re.search(r"all_reduce SUM of 4 float64: has waited \d+ s for rank 1 on", messages[0]), messages[0]
    assert "and is not waiting, rank 2 on" in messages[0]


def test_a_short_wait_can_be_repeated() -> None:
    def work(group: ProcessGroup) -> Any:
        array = np.zeros(3)
        if group.rank == 1:
            group.barrier()
            group.send(np.arange(3.0), 0)
            return None
        handle = group.irecv(array, 1)
        assert not handle.is_completed()
        with pytest.raises(PeerError, match=r"receive from rank 1: has waited 0.1 s for rank 1 on"):
            handle.wait(0.1)
        group.barrier()
        handle.wait()
        handle.wait(0.0)
        assert handle.is_completed()
        return array.tolist()

    assert raise_first(run_tcp(2, work))[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("run", [run_local, run_tcp])
def test_an_exception_is_told_to_all(run: Any) -> None:
    def work(group: ProcessGroup) -> None:
        group.barrier()  # a rank that still joins would hear of the error there
        if group.rank == 1:
            raise ValueError("injected")
        group.barrier()

    results = run(3, work, timeout=300.0)
    assert type(results[1]) is ValueError
    for rank in (0, 2):
        assert f"rank {rank} on " in str(results[rank])
        assert "barrier: rank 1 on " in str(results[rank]) and "ValueError: injected" in str(results[rank])


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    def work(group: ProcessGroup) -> None:
        group.barrier()
        if group.rank != 1:
            group.all_reduce(np.zeros(3, np.float32))

    messages = only(run_tcp(2, work))
    assert len(messages) == 1
    assert "all_reduce SUM of 3 float32: rank 1 on " in messages[0] and "has left" in messages[0]


def test_a_rank_may_leave_when_its_part_is_done() -> None:
    """What a rank has given is there for the others after it has left, if the store's holder stays."""

    def work(group: ProcessGroup) -> Any:
        array = np.full(2, float(group.rank))
        if group.rank == 1:
            group.broadcast(array, 1)
            group.send(array, 0)
            return None
        time.sleep(0.3)
        received = np.zeros(2)
        group.broadcast(array, 1)
        group.recv(received, 1)
        return [*array, *received]

    assert raise_first(run_tcp(2, work))[0] == [1.0] * 4


def test_a_destroyed_group_refuses_everything() -> None:
    def work(group: ProcessGroup) -> None:
        group.destroy()
        group.destroy()
        group.barrier()

    messages = only(run_tcp(2, work), UserError)
    assert len(messages) == 2
    assert all(message.endswith("barrier: the process group was destroyed") for message in messages)


def test_rank_0_says_who_does_not_leave() -> None:
    release = threading.Event()

    def work(group: ProcessGroup) -> str:
        if group.rank == 1:
            release.wait(300)
            return ""
        group.timeout = 0.3
        with pytest.raises(PeerError) as caught:
            group.destroy()
        release.set()
        return str(caught.value)

    message = raise_first(run_tcp(2, work))[0]
    assert "destroy_process_group: has waited 0.3 s for rank 1 on" in message and message.endswith("to leave")


class GpuArray:
    """Looks like a CuPy array, as far as the host backends are concerned."""

    __cuda_array_interface__: dict[str, Any] = {}

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.dtype, self.shape, self.size = values.dtype, values.shape, values.size
        self.ndim, self.flags = values.ndim, values.flags

    def __getitem__(self, part: slice) -> GpuArray:
        return GpuArray(self.values[part])

    def get(self) -> np.ndarray:
        return self.values.copy()

    def set(self, values: np.ndarray) -> None:
        assert values.shape == self.shape
        self.values[...] = values


def test_gpu_arrays_travel_through_host_memory() -> None:
    def work(group: ProcessGroup) -> int:
        return Checker(group, lambda values: GpuArray(values.copy()), lambda array: array.values).everything()

    assert min(raise_first(run_local(2, work))) > 400


def test_host_arrays_are_refused_by_nccl() -> None:
    from caffepy.distributed.group import check_array

    with pytest.raises(UserError, match="tensor is in host memory: backend 'nccl' takes CuPy arrays, 'mpi' and 'tcp'"):
        check_array(ARRAY, "tensor", "gpu", written=True)
