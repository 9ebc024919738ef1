"""The operations of `torch.distributed`, with its names, order and meaning of arguments, over a group.

`src` and `dst` are ranks of the default group, `group_src` and `group_dst` ranks of `group`; None means the default
group. On a rank that is not a member of `group` an operation does nothing and returns None. All others follow
`ProcessGroup`, whose methods do the work and raise the errors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from caffepy.backend.types import Array
from caffepy.distributed.communicators.communicator import ReduceOp
from caffepy.distributed.default import AnyGroup, GroupMember, get_group
from caffepy.distributed.group import Handle, Parts, ProcessGroup
from caffepy.errors import UserError

logger = logging.getLogger(__name__)


# -- point to point -----------------------------------------------------------------------------------


def send(
    tensor: Array, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send an array to a rank that receives one of the same dtype and size with the same tag."""
    if (member := _member(group, "send")) is not None:
        member.send(tensor, _peer(member, "send", "dst", dst, group_dst), tag)


def recv(
    tensor: Array, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive an array from a rank; messages with the same tag arrive in sending order.

    Returns:
        The sender's rank in the default group; -1 on a rank that is not a member. A sender must be named: torch's
        reception from any rank is not supported.
    """
    member = _member(group, "recv")
    if member is None:
        return -1
    found = member.recv(tensor, _peer(member, "recv", "src", src, group_src), tag)
    return member.default_ranks[found]


def isend(
    tensor: Array, dst: int | None = None, group: AnyGroup = None, tag: int = 0, group_dst: int | None = None
) -> Handle | None:
    """Start to send. The array must not be modified until the handle's `wait`."""
    member = _member(group, "isend")
    if member is None:
        return None
    return member.isend(tensor, _peer(member, "isend", "dst", dst, group_dst), tag)


def irecv(
    tensor: Array, src: int | None = None, group: AnyGroup = None, tag: int = 0, group_src: int | None = None
) -> Handle | None:
    """Start to receive. The array contains the message after the handle's `wait`."""
    member = _member(group, "irecv")
    if member is None:
        return None
    return member.irecv(tensor, _peer(member, "irecv", "src", src, group_src), tag)


# -- collectives --------------------------------------------------------------------------------------


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """tensor = the tensor of rank `src`."""
    member = _member(group, "broadcast")
    if member is None:
        return None
    return member.broadcast(tensor, _root(member, "broadcast", "src", src, group_src), async_op)


def all_reduce(
    tensor: Array, op: ReduceOp = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle | None:
    """tensor = op(all ranks' tensors), element by element, on every rank."""
    member = _member(group, "all_reduce")
    return None if member is None else member.all_reduce(tensor, op, async_op)


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """On rank `dst`: tensor = op(all ranks' tensors); other ranks' tensors are unchanged."""
    member = _member(group, "reduce")
    if member is None:
        return None
    return member.reduce(tensor, _root(member, "reduce", "dst", dst, group_dst), op, async_op)


def all_gather(tensor_list: Parts, tensor: Array, group: AnyGroup = None, async_op: bool = False) -> Handle | None:
    """tensor_list[i] = the tensor of rank i, on every rank."""
    member = _member(group, "all_gather")
    return None if member is None else member.all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: Array, input_tensor: Array, group: AnyGroup = None, async_op: bool = False
) -> Handle | None:
    """output_tensor = the input tensors of all ranks, one after the other, on every rank."""
    return all_gather(output_tensor, input_tensor, group, async_op)


def gather(
    tensor: Array,
    gather_list: Parts | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """On rank `dst`: gather_list[i] = the tensor of rank i; other ranks pass no list."""
    member = _member(group, "gather")
    if member is None:
        return None
    return member.gather(tensor, gather_list, _root(member, "gather", "dst", dst, group_dst), async_op)


def scatter(
    tensor: Array,
    scatter_list: Parts | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """tensor = scatter_list[rank] of rank `src`; other ranks pass no list."""
    member = _member(group, "scatter")
    if member is None:
        return None
    return member.scatter(tensor, scatter_list, _root(member, "scatter", "src", src, group_src), async_op)


def reduce_scatter(
    output: Array, input_list: Parts, op: ReduceOp = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle | None:
    """output = op(all ranks' input_list[rank])."""
    member = _member(group, "reduce_scatter")
    return None if member is None else member.reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(
    output: Array, input: Array, op: ReduceOp = ReduceOp.SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle | None:
    """output = op(all ranks' part `rank` of the input)."""
    return reduce_scatter(output, input, op, group, async_op)


def all_to_all(
    output_tensor_list: Parts, input_tensor_list: Parts, group: AnyGroup = None, async_op: bool = False
) -> Handle | None:
    """output_tensor_list[i] = input_tensor_list[rank] of rank i; all parts have one shape."""
    member = _member(group, "all_to_all")
    return None if member is None else member.all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle | None:
    """Part i of the output = part `rank` of rank i's input; all parts have one shape."""
    if len({*(output_split_sizes or ()), *(input_split_sizes or ())}) > 1:
        raise UserError("all_to_all_single: the split sizes differ; only parts of one size are supported")
    return all_to_all(output, input, group, async_op)


def barrier(group: AnyGroup = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Handle | None:
    """Wait for all ranks; on GPUs, also for the preceding operations on the current stream. `device_ids` is ignored."""
    member = _member(group, "barrier")
    return None if member is None else member.barrier(async_op)


# -- objects ------------------------------------------------------------------------------------------


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """object_list[:] = the objects of rank `src`; the lists are of one length.

    An object consists of None, booleans, numbers, text, bytes, paths and NumPy arrays of numbers, in lists, tuples and
    dictionaries; UserError for any other. It travels as JSON through rank 0, and nothing is unpickled; for large
    arrays, `broadcast` is faster. `device` is ignored.
    """
    if (member := _member(group, "broadcast_object_list")) is not None:
        member.broadcast_object_list(object_list, _root(member, "broadcast_object_list", "src", src, group_src))


def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup = None) -> None:
    """object_list[i] = the object of rank i, on every rank; objects as in `broadcast_object_list`."""
    if (member := _member(group, "all_gather_object")) is not None:
        member.all_gather_object(object_list, obj)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    group_dst: int | None = None,
) -> None:
    """On rank `dst`: object_gather_list[i] = the object of rank i; other ranks pass no list.

    Objects are those of `broadcast_object_list`.
    """
    if (member := _member(group, "gather_object")) is not None:
        member.gather_object(obj, object_gather_list, _root(member, "gather_object", "dst", dst, group_dst))


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    group_src: int | None = None,
) -> None:
    """scatter_object_output_list[0] = scatter_object_input_list[rank] of rank `src`.

    Objects are those of `broadcast_object_list`. The lists of other ranks than `src` are not read.
    """
    if (member := _member(group, "scatter_object_list")) is not None:
        root = _root(member, "scatter_object_list", "src", src, group_src)
        member.scatter_object_list(scatter_object_output_list, scatter_object_input_list, root)


# -- arguments ----------------------------------------------------------------------------------------


def _member(group: AnyGroup, what: str) -> ProcessGroup | None:
    """Return the group of a call; None, with a warning, on a rank that is not its member."""
    if isinstance(group, GroupMember):
        logger.warning("%s does nothing on this rank, which is not a member of the group", what)
        return None
    return get_group() if group is None else group


def _root(member: ProcessGroup, what: str, name: str, rank: int | None, group_rank: int | None) -> int:
    """Return the rank in the group of a root, 0 if none is named."""
    return 0 if rank is None and group_rank is None else _peer(member, what, name, rank, group_rank)


def _peer(member: ProcessGroup, what: str, name: str, rank: int | None, group_rank: int | None) -> int:
    """Return the rank in the group of a rank of the default group or of the group."""
    with member.reporting(what):
        if (rank is None) == (group_rank is None):
            raise UserError(f"give {name}= or group_{name}=, {'one of them' if rank is None else 'not both'}")
        return member.rank_of(rank, name) if group_rank is None else group_rank
