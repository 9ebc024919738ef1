"""The functions take what torch.distributed's take, and do the same; their group is one of threads here."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from process_groups import raise_first, run_local, run_tcp

from caffepy import distributed as dist
from caffepy.errors import UserError

TORCH = {
    "send": "tensor dst group tag group_dst",
    "recv": "tensor src group tag group_src",
    "isend": "tensor dst group tag group_dst",
    "irecv": "tensor src group tag group_src",
    "broadcast": "tensor src group async_op group_src",
    "all_reduce": "tensor op group async_op",
    "reduce": "tensor dst op group async_op group_dst",
    "all_gather": "tensor_list tensor group async_op",
    "all_gather_into_tensor": "output_tensor input_tensor group async_op",
    "gather": "tensor gather_list dst group async_op group_dst",
    "scatter": "tensor scatter_list src group async_op group_src",
    "reduce_scatter": "output input_list op group async_op",
    "reduce_scatter_tensor": "output input op group async_op",
    "all_to_all": "output_tensor_list input_tensor_list group async_op",
    "all_to_all_single": "output input output_split_sizes input_split_sizes group async_op",
    "barrier": "group async_op device_ids",
    "all_gather_object": "object_list obj group",
    "gather_object": "obj object_gather_list dst group group_dst",
    "broadcast_object_list": "object_list src group device group_src",
    "scatter_object_list": "scatter_object_output_list scatter_object_input_list src group group_src",
    "init_process_group": "backend init_method timeout world_size rank",
    "new_group": "ranks timeout backend",
    "get_rank": "group",
    "get_world_size": "group",
    "get_backend": "group",
    "destroy_process_group": "group",
    "is_available": "",
    "is_initialized": "",
    "spawn": "fn args nprocs join daemon",
    "DistributedDataParallel": "module device_ids output_device",
}
"""The first arguments of PyTorch 2.9's functions, in their order; `spawn` is torch.multiprocessing's."""


@pytest.mark.parametrize("name", TORCH)
def test_arguments_have_torchs_names_and_order(name: str) -> None:
    names = [one.name for one in inspect.signature(getattr(dist, name)).parameters.values()]
    wanted = TORCH[name].split()
    assert names[: len(wanted)] == wanted


def test_the_table_has_every_operation() -> None:
    functions = {name for name in dist.__all__ if inspect.isfunction(getattr(dist, name))}
    assert functions - {"get_group", "get_local_rank"} <= set(TORCH)


def point_to_point(group: dist.ProcessGroup) -> list[float]:
    tensor, rank = np.zeros(1), dist.get_rank(group)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1, group=group)
        request = dist.irecv(tensor, src=1, group=group)
    else:
        assert dist.recv(tensor, 0, group) == 0
        request = dist.isend(tensor + 1, dst=0, group=group)
    assert request is not None and request.wait(timedelta(seconds=300))
    return tensor.tolist()


def reduced(group: dist.ProcessGroup) -> list[Any]:
    rank, found = dist.get_rank(group), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        tensor = np.full(1, rank + 1.0)
        dist.all_reduce(tensor, op=op, group=group)
        found += tensor.tolist()
    tensor = np.full(1, rank + 1.0)
    work = dist.all_reduce(tensor, dist.ReduceOp.SUM, group, True)
    assert work is not None and work.wait()
    dist.reduce(tensor, dst=1, op=dist.ReduceOp.SUM, group=group)
    dist.reduce_scatter(output := np.zeros(1), [np.full(1, 1.0), np.full(1, 2.0)], group=group)
    dist.reduce_scatter_tensor(output, np.full(2, output[0]), group=group)
    return [*found, *tensor.tolist(), *output.tolist()]


def moved(group: dist.ProcessGroup) -> list[Any]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own, whole, parts = np.full(1, rank), np.zeros(size, int), [np.zeros(1, int) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    dist.all_gather_into_tensor(whole, own, group)
    found = [*np.ravel(parts).tolist(), *whole.tolist()]
    dist.gather(own, gather_list=parts if rank == 1 else [], dst=1, group=group)
    dist.scatter(own, scatter_list=[np.full(1, 7), np.full(1, 8)] if rank == 1 else None, src=1, group=group)
    dist.broadcast(whole, src=1, group=group, async_op=False)
    dist.barrier(group=group)
    dist.all_to_all(parts, [np.full(1, rank), np.full(1, rank + 10)], group=group)
    dist.all_to_all_single(whole, np.array([rank, rank + 10]), [1, 1], [1, 1], group=group)
    return [*found, *own.tolist(), *np.ravel(parts).tolist(), *whole.tolist()]


def objects(group: dist.ProcessGroup) -> list[Any]:
    rank = dist.get_rank(group)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, {"rank": rank}, group=group)
    some: list[Any] = ["a", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(some, src=1, group=group)
    taken: list[Any] | None = [None, None] if rank == 1 else None
    dist.gather_object((rank,), taken, dst=1, group=group)
    one: list[Any] = [None]
    dist.scatter_object_list(one, [b"x", b"y"] if rank == 1 else [None, None], src=1, group=group)
    return [every, some, taken, one]


@pytest.mark.parametrize("run", [run_local, run_tcp])
def test_every_function_on_two_ranks(run: Any) -> None:
    assert raise_first(run(2, point_to_point)) == [[2.0], [1.0]]
    first, second = raise_first(run(2, reduced))
    assert first == [3.0, 2.0, 1.0, 2.0, 1.5, 3.0, 6.0]
    assert second == [3.0, 2.0, 1.0, 2.0, 1.5, 6.0, 6.0]
    assert raise_first(run(2, moved)) == [[0, 1, 0, 1, 7, 0, 1, 0, 1], [0, 1, 0, 1, 8, 10, 11, 10, 11]]
    ranks = [{"rank": 0}, {"rank": 1}]
    assert raise_first(run(2, objects)) == [[ranks, ["a", 1], None, [b"x"]], [ranks, ["a", 1], [(0,), (1,)], [b"y"]]]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda g: dist.send(np.zeros(1), group=g), "send: give dst= or group_dst=, one of them"),
        (lambda g: dist.recv(np.zeros(1), group=g), "recv: give src= or group_src=, one of them"),
        (lambda g: dist.send(np.zeros(1), 1, g, group_dst=1), "send: give dst= or group_dst=, not both"),
        (lambda g: dist.broadcast(np.zeros(1), 2, g), "broadcast: src 2 is not a rank of this group: ranks are 0, 1"),
        (lambda g: dist.all_reduce(np.zeros(1), dist.ReduceOp, g), "op is .*; known: SUM, PRODUCT, MIN, MAX, AVG"),
        (
            lambda g: dist.all_gather_object([None], 1, g),
            "all_gather_object: object_list has 1 elements; it should have 2",
        ),
        (lambda g: dist.all_gather_object(1, [None], g), "all_gather_object: object_list is a int: pass a list"),
        (lambda g: dist.gather_object(1, group=g), "gather_object: object_gather_list is missing on the root, rank 0"),
        (lambda g: dist.scatter_object_list([], [1, 2], 0, g), "scatter_object_output_list is empty"),
        (lambda g: dist.broadcast_object_list([{1, 2}], 0, g), "a set does not travel from rank to rank"),
        (lambda g: dist.all_to_all_single(np.zeros(3), np.zeros(3), [1, 2], group=g), "the split sizes differ"),
    ],
)
def test_arguments_that_cannot_be_are_refused(action: Any, message: str) -> None:
    def work(group: dist.ProcessGroup) -> str:
        if group.rank == 1:
            return ""
        with pytest.raises(UserError) as caught:
            action(group)
        return str(caught.value)

    found = raise_first(run_local(2, work))[0]
    assert re.search(message, found), found


def test_a_rank_that_is_not_a_member_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    nobody, array = dist.GroupMember.NON_GROUP_MEMBER, np.zeros(1)
    assert (dist.get_rank(nobody), dist.get_world_size(nobody), dist.recv(array, 0, nobody)) == (-1, -1, -1)
    assert dist.all_reduce(array, group=nobody, async_op=True) is None
    dist.all_gather_object([], 1, nobody)
    dist.destroy_process_group(nobody)
    assert caplog.messages[-2] == "all_reduce does nothing on this rank, which is not a member of the group"
