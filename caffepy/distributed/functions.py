"""The default group's operations as functions; each is the method of `ProcessGroup` of the same name."""

from __future__ import annotations

from caffepy.backend.types import Array
from caffepy.distributed.arrays import Parts
from caffepy.distributed.default import get_group
from caffepy.distributed.handle import Handle
from caffepy.parallel.communicators.collectives import Operator

SUM, PRODUCT, MIN, MAX, AVG = Operator.SUM, Operator.PRODUCT, Operator.MIN, Operator.MAX, Operator.AVG


def get_rank() -> int:
    """This process's number, from 0."""
    return get_group().rank


def get_world_size() -> int:
    """How many processes there are."""
    return get_group().size


def get_local_rank() -> int:
    """This process's number among those of its machine, from 0."""
    return get_group().local_rank


def send(array: Array, destination: int, tag: int = 0) -> None:
    """Send an array to a rank, which receives it with the same tag."""
    get_group().send(array, destination, tag)


def recv(array: Array, source: int, tag: int = 0) -> None:
    """array = what rank `source` sends with that tag."""
    get_group().recv(array, source, tag)


def isend(array: Array, destination: int, tag: int = 0) -> Handle:
    """Start to send; the array must be left alone until the handle's `wait`."""
    return get_group().isend(array, destination, tag)


def irecv(array: Array, source: int, tag: int = 0) -> Handle:
    """Start to receive; the array holds the message after the handle's `wait`."""
    return get_group().irecv(array, source, tag)


def broadcast(array: Array, root: int = 0, async_op: bool = False) -> Handle:
    """array = the root's array."""
    return get_group().broadcast(array, root, async_op)


def all_reduce(array: Array, operator: Operator = SUM, async_op: bool = False) -> Handle:
    """array = operator(all ranks' arrays), element by element, on every rank."""
    return get_group().all_reduce(array, operator, async_op)


def reduce(array: Array, root: int = 0, operator: Operator = SUM, async_op: bool = False) -> Handle:
    """On the root: array = operator(all ranks' arrays); the others' arrays stay as they are."""
    return get_group().reduce(array, root, operator, async_op)


def all_gather(outputs: Parts, array: Array, async_op: bool = False) -> Handle:
    """outputs[i] = the array of rank i, on every rank."""
    return get_group().all_gather(outputs, array, async_op)


def gather(array: Array, outputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
    """On the root: outputs[i] = the array of rank i; the others give no outputs."""
    return get_group().gather(array, outputs, root, async_op)


def scatter(array: Array, inputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
    """array = the root's inputs[rank]; the others give no inputs."""
    return get_group().scatter(array, inputs, root, async_op)


def reduce_scatter(array: Array, inputs: Parts, operator: Operator = SUM, async_op: bool = False) -> Handle:
    """array = operator(all ranks' inputs[rank])."""
    return get_group().reduce_scatter(array, inputs, operator, async_op)


def all_to_all(outputs: Parts, inputs: Parts, async_op: bool = False) -> Handle:
    """outputs[i] = inputs[rank] of rank i; all parts have one shape."""
    return get_group().all_to_all(outputs, inputs, async_op)


def barrier(async_op: bool = False) -> Handle:
    """Wait until all ranks are here."""
    return get_group().barrier(async_op)
