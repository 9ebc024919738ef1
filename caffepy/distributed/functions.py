"""The default group's operations as functions; each is the method of `ProcessGroup` of the same name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from caffepy.distributed.default import get_group
from caffepy.distributed.group import ProcessGroup
from caffepy.parallel.communicators.collectives import Operator

P = ParamSpec("P")
T = TypeVar("T")

SUM, PRODUCT, MIN, MAX, AVG = Operator.SUM, Operator.PRODUCT, Operator.MIN, Operator.MAX, Operator.AVG


def _of_default_group(method: Callable[Concatenate[ProcessGroup, P], T]) -> Callable[P, T]:
    """A method as a function, with its signature and documentation, that acts on the default group."""

    @wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(get_group(), *args, **kwargs)

    signature = inspect.signature(method)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    return function


send = _of_default_group(ProcessGroup.send)
recv = _of_default_group(ProcessGroup.recv)
isend = _of_default_group(ProcessGroup.isend)
irecv = _of_default_group(ProcessGroup.irecv)
broadcast = _of_default_group(ProcessGroup.broadcast)
all_reduce = _of_default_group(ProcessGroup.all_reduce)
reduce = _of_default_group(ProcessGroup.reduce)
all_gather = _of_default_group(ProcessGroup.all_gather)
gather = _of_default_group(ProcessGroup.gather)
scatter = _of_default_group(ProcessGroup.scatter)
reduce_scatter = _of_default_group(ProcessGroup.reduce_scatter)
all_to_all = _of_default_group(ProcessGroup.all_to_all)
barrier = _of_default_group(ProcessGroup.barrier)


def get_rank() -> int:
    """This process's number, from 0."""
    return get_group().rank


def get_world_size() -> int:
    """How many processes there are."""
    return get_group().size


def get_local_rank() -> int:
    """This process's number among those of its machine, from 0."""
    return get_group().local_rank
