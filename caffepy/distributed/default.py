"""The default process group, and its operations as functions."""

from __future__ import annotations

import atexit
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from caffepy.distributed.arrays import whole_number
from caffepy.distributed.backends import BACKENDS, create_communicator, default_backend
from caffepy.distributed.group import ProcessGroup
from caffepy.distributed.rendezvous import Membership, join, join_subgroup
from caffepy.errors import CaffepyError, UserError
from caffepy.parallel.communicators.collectives import ReduceOp

P = ParamSpec("P")
T = TypeVar("T")

SUM, PRODUCT, MIN, MAX, AVG = ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG
_WITHDRAW_SECONDS = 2.0
"""Seconds that rank 0 stays after a failed connection so that the others receive the reason."""

_lock = threading.Lock()
_group: ProcessGroup | None = None


def connect(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta = 300.0,
    device: int | None = None,
) -> ProcessGroup:
    """Return a new group without making it the default. Arguments and errors as in `init_process_group`."""
    backend, seconds = _known_backend(backend), _seconds(timeout)
    rank, world_size, device = (
        _whole(name, value) for name, value in (("rank", rank), ("world_size", world_size), ("device", device))
    )
    membership = join(init_method, rank, world_size, seconds)
    return _group_of(membership, backend or default_backend(membership), seconds, device, "init_process_group")


def _group_of(membership: Membership, backend: str, seconds: float, device: int | None, function: str) -> ProcessGroup:
    """Connect the members; `function` is the script's call, for messages."""
    try:
        return ProcessGroup(backend, membership, create_communicator(backend, membership, seconds, device), seconds)
    except BaseException as error:
        message = f"{membership.name(membership.rank)}: {function}: {error}"
        _withdraw(membership, message)
        if isinstance(error, CaffepyError):
            error.args = (message,)
        raise


def _known_backend(name: str | None) -> str | None:
    backend = None if name is None else str(name).lower().replace("gloo", "tcp")
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"backend '{name}' is not known; known: {', '.join(BACKENDS)}")
    return backend


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 1e9:
        raise UserError(f"timeout is {timeout}; it must be a positive number of seconds")
    return seconds


def _whole(name: str, value: int | None) -> int | None:
    number = None if value is None else whole_number(value)
    if number is None and value is not None:
        raise UserError(f"{name} is {value!r}; it must be an integer")
    return number


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta = 300.0,
    device: int | None = None,
) -> ProcessGroup:
    """Create the default group. Called once by each process.

    Example:
        >>> import numpy as np
        >>> from caffepy import distributed
        >>> with distributed.init_process_group("tcp", "tcp://127.0.0.1:29500", rank=0, world_size=1):
        ...     array = np.ones(3, np.float32)
        ...     distributed.all_reduce(array)

    Args:
        backend: ``nccl`` (CuPy arrays), ``mpi`` or ``tcp`` (NumPy and CuPy arrays; slow, but without dependencies),
            case-insensitive; ``gloo`` means ``tcp``. None: ``mpi`` under mpirun, else ``tcp``.
        init_method: ``mpi://``, ``env://``, ``tcp://host:port`` or ``file:///path``. None: ``env://`` if MASTER_ADDR,
            MASTER_PORT, RANK and WORLD_SIZE are set, else ``mpi://``, a group of one if no launcher started the
            process.
        rank: this process's rank; None: from RANK or the launcher.
        world_size: the number of processes; None: from WORLD_SIZE or the launcher.
        timeout: longest wait of any operation, in seconds.
        device: for ``nccl``, this process's GPU, which becomes current. None: assign the GPUs of a host to its ranks in
            order.

    Returns:
        The group, which can be used in a ``with`` statement.

    Raises:
        UserError: an invalid argument, or the default group exists already.
        PeerError: not all processes joined in time, or one failed.
        MissingExtraError: the backend's library is not installed.
    """
    global _group
    with _lock:
        if is_initialized():
            raise UserError("init_process_group was called before: call destroy_process_group first")
        _group = connect(backend, init_method, rank=rank, world_size=world_size, timeout=timeout, device=device)
        return _group


def is_initialized() -> bool:
    """Return whether the default group exists."""
    return _group is not None and not _group.destroyed


def get_group() -> ProcessGroup:
    """Return the default group.

    Raises:
        UserError: it does not exist.
    """
    group = _group
    if group is None or group.destroyed:
        raise UserError("there is no process group: call caffepy.distributed.init_process_group first")
    return group


def destroy_process_group() -> None:
    """Leave the default group. Rank 0 waits for all others to leave, at most for the timeout."""
    get_group().destroy()


def new_group(
    ranks: Sequence[int] | None = None, timeout: float | timedelta | None = None, backend: str | None = None
) -> ProcessGroup | None:
    """Create a group of some ranks of the default group. Called by all ranks of the default group, in the same order.

    Leaving the default group leaves the new group too.

    Args:
        ranks: the members, sorted for their new ranks; None: all.
        timeout: longest wait of any operation, in seconds; None: as in the default group.
        backend: as in `init_process_group`; None: as in the default group. ``nccl`` uses the current GPU of each rank.

    Returns:
        The group; None on ranks that are not its members.

    Raises:
        UserError: an invalid argument, or there is no default group.
        PeerError: not all members joined in time.
    """
    parent = get_group()
    named = range(parent.size) if ranks is None else ranks
    members = sorted({number for rank in named if (number := whole_number(rank)) is not None})
    if len(members) < len(named) or not members or not 0 <= members[0] <= members[-1] < parent.size:
        raise UserError(f"ranks are {list(named)}; name different ranks from 0 to {parent.size - 1}")
    seconds = parent.timeout if timeout is None else _seconds(timeout)
    chosen = _known_backend(backend) or parent.backend
    number = next(parent.subgroups)
    if parent.rank not in members:
        return None
    membership = join_subgroup(parent.membership, members, number, seconds)
    group = _group_of(membership, chosen, seconds, _current_gpu() if chosen == "nccl" else None, "new_group")

    def leave() -> None:
        if parent.failure is None or group.destroyed:
            group.destroy()
        else:
            group.abort(parent.failure)

    parent.releases.append(leave)
    return group


def _current_gpu() -> int:
    from caffepy.parallel.communicators.nccl import current_gpu

    return current_gpu()


def get_backend() -> str:
    """Return the name of the default group's backend."""
    return get_group().backend


def _of_default_group(method: Callable[Concatenate[ProcessGroup, P], T]) -> Callable[P, T]:
    """Return a function with a group method's signature and docstring that acts on the default group."""

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
broadcast_object = _of_default_group(ProcessGroup.broadcast_object)
all_gather_object = _of_default_group(ProcessGroup.all_gather_object)
gather_object = _of_default_group(ProcessGroup.gather_object)


def get_rank() -> int:
    """Return this process's rank, from 0."""
    return get_group().rank


def get_world_size() -> int:
    """Return the number of processes."""
    return get_group().size


def get_local_rank() -> int:
    """Return this process's rank on its host, from 0."""
    return get_group().local_rank


def _withdraw(membership: Membership, message: str) -> None:
    """Report to the others that this rank could not be connected."""
    membership.channel.fail(message)
    membership.channel.wait_alone(_WITHDRAW_SECONDS)
    membership.channel.close()


@atexit.register
def _end() -> None:
    """Leave the group at the script's exit, or report its error to the others.

    MPI ranks with an abandoned operation would block in MPI_Finalize, so they exit at once.
    """
    group = _group
    if group is None:
        return
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if not group.destroyed:
        if group.failure is not None:
            group.abort(group.failure)
        elif error is not None:
            group.abort(group.describe_failure(error))
        else:
            group.destroy()
    if group.failure is not None:
        group.end_world()
