"""The default process group, groups of some of its ranks, and the choice of a group's communicator.

`functions.py` has the operations.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from enum import Enum
from multiprocessing.util import Finalize
from types import TracebackType

from caffepy.distributed.communicators.communicator import Communicator, ReduceOp
from caffepy.distributed.connect import connect_by_store, connect_gpu
from caffepy.distributed.group import ProcessGroup, whole_number
from caffepy.distributed.processes.launcher import find_launcher, left
from caffepy.distributed.rendezvous import Membership, join, join_subgroup
from caffepy.errors import CaffepyError, PeerError, UserError

BACKENDS = ("nccl", "mpi", "tcp")
_POLL_SECONDS = 0.2


def default_backend(membership: Membership) -> str:
    """Return ``mpi`` if MPI started the processes, else ``tcp``."""
    return "mpi" if membership.world is not None else "tcp"


def create_communicator(
    backend: str, membership: Membership, timeout: float, device: int | None = None
) -> Communicator:
    """Connect the group's ranks. Called by all ranks.

    Raises:
        UserError: an unknown or unavailable backend.
        PeerError: the ranks could not be connected.
    """
    if backend == "nccl":
        return _connect_gpus(membership, timeout, device)
    if device is not None:
        raise UserError(f"device_id is for backend 'nccl'; '{backend}' takes arrays on any device")
    if backend == "tcp" or (backend == "mpi" and membership.size == 1):
        return connect_by_store(membership.channel, membership.rank, membership.size, timeout)
    if membership.world is None:
        raise UserError("backend 'mpi' needs mpirun, and mpi:// or no init_method; 'tcp' works without MPI")
    return membership.world.communicator(membership.world_ranks)


def _connect_gpus(membership: Membership, timeout: float, device: int | None) -> Communicator:
    """Create NCCL's communicator in a thread, because NCCL would wait forever for a missing peer."""
    from caffepy.distributed.communicators.nccl import gpu_identity, new_unique_id, use_gpu

    channel, rank, size = membership.channel, membership.rank, membership.size
    gpu = _choose_gpu(membership) if device is None else device
    use_gpu(gpu)
    unique_id = bytes(new_unique_id()) if rank == 0 else b""
    # The PCI address, because a GPU's number depends on CUDA_VISIBLE_DEVICES; and the machine, because two have GPUs of
    # one address.
    own = [membership.members[rank].machine, gpu_identity(gpu), unique_id.hex()]
    channel.put(f"gpu/{rank}", json.dumps(own).encode())
    # Through the store: NCCL connects only when all ranks have its identity, which rank 0 has made.
    found = [_take(membership, f"gpu/{other}", other, timeout) for other in range(size)]
    _check_gpus(membership, [(machine, identity) for machine, identity, _ in found])
    host = connect_by_store(channel, rank, size, timeout)
    made: Future[Communicator] = Future()

    def connect() -> None:
        try:
            use_gpu(gpu)
            made.set_result(connect_gpu(host, bytes.fromhex(found[0][2])))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=connect, name="NCCL connection", daemon=True).start()
    deadline = time.monotonic() + timeout
    while not wait([made], _POLL_SECONDS).done:
        # The group's monitor does not run yet: a rank that failed would be waited for until the timeout.
        if failure := channel.watch([], 0.0):
            raise PeerError(failure.message)
        if time.monotonic() > deadline:
            raise PeerError(f"NCCL has not connected the GPUs within {timeout:g} s")
    return made.result()


def _choose_gpu(membership: Membership) -> int:
    """Return this rank's GPU on its host; the only visible GPU if each rank sees one."""
    from caffepy.backend.cuda.device import device_count

    count, needed = device_count(), membership.local_size
    if count == 1:
        return 0
    if count < needed:
        raise UserError(
            f"this host has {count} GPUs for {needed} ranks: start fewer ranks, or give each its device_id="
        )
    return membership.local_rank


def _check_gpus(membership: Membership, identities: list[tuple[str, str]]) -> None:
    """Reject two ranks on one GPU, for which NCCL reports only 'invalid usage'."""
    for rank, identity in enumerate(identities):
        first = identities.index(identity)
        if first != rank:
            raise UserError(
                f"{membership.name(first)} and {membership.name(rank)} both use the GPU at {identity[1]}: "
                f"give each its device_id="
            )


def _take(membership: Membership, key: str, owner: int, timeout: float) -> list[str]:
    value = membership.channel.take(key, timeout, owner)
    if value is None:
        raise PeerError(f"has waited {timeout:g} s for {membership.name(owner)} to choose its GPU")
    found: list[str] = json.loads(value)
    return found


SUM, PRODUCT, MIN, MAX, AVG = ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG


class GroupMember(Enum):
    """The result of `new_group` on a rank that is not a member of the new group."""

    NON_GROUP_MEMBER = -100


AnyGroup = ProcessGroup | GroupMember | None
"""A group as an argument; None: the default group."""
_WITHDRAW_SECONDS = 2.0
"""Seconds that rank 0 stays after a failed connection so that the others receive the reason."""

_lock = threading.Lock()
_group: ProcessGroup | None = None
_refused = False
"""Whether an error has kept this process out of a group. The script may have caught it."""


def connect(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta = 300.0,
    device_id: int | None = None,
) -> ProcessGroup:
    """Return a new group without making it the default. Arguments and errors as in `init_process_group`."""
    backend, seconds = _known_backend(backend), _seconds(timeout)
    rank, world_size, device_id = (
        _whole(name, value) for name, value in (("rank", rank), ("world_size", world_size), ("device_id", device_id))
    )
    if backend == "mpi" and init_method in (None, "env://", "mpi://") and _started_by_mpi():
        init_method, rank, world_size = "mpi://", None, None  # MPI knows them; torch's scripts pass 0 and 0
    membership = join(init_method, rank, world_size, seconds)
    return _group_of(membership, backend or default_backend(membership), seconds, device_id, "init_process_group")


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


def _started_by_mpi() -> bool:
    launcher = find_launcher()
    return launcher is not None and launcher.store is None and launcher.size != 1


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
    timeout: float | timedelta | None = None,
    world_size: int | None = -1,
    rank: int | None = -1,
    *,
    group_name: str = "",
    device_id: int | None = None,
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
        init_method: ``mpi://``, ``env://``, ``tcp://host:port`` or ``file:///path``. None: ``env://`` if MASTER_ADDR
            and MASTER_PORT are set and rank and world size are given or in RANK and WORLD_SIZE; else ``mpi://``, a
            group of one if no launcher started the process.
        timeout: longest wait of any operation, in seconds; None: 300.
        world_size: the number of processes; -1: from WORLD_SIZE or the launcher. Ignored over MPI with `backend` mpi.
        rank: this process's rank; -1: from RANK or the launcher. Ignored over MPI with `backend` mpi.
        group_name: ignored, as in torch.distributed.
        device_id: for ``nccl``, this process's GPU, which becomes current. None: assign the GPUs of a host to its
            ranks in order.

    Returns:
        The group, which can be used in a ``with`` statement.

    Raises:
        UserError: an invalid argument, or the default group exists already.
        PeerError: not all processes joined in time, or one failed.
        MissingExtraError: the backend's library is not installed.
    """
    global _group, _refused
    with _lock:
        if is_initialized():
            raise UserError("init_process_group was called before: call destroy_process_group first")
        try:
            _group = connect(
                backend,
                init_method,
                rank=None if rank == -1 else rank,
                world_size=None if world_size == -1 else world_size,
                timeout=300.0 if timeout is None else timeout,
                device_id=device_id,
            )
        except Exception:
            _refused = True
            raise
        _report_errors_once()
        if multiprocessing.parent_process() is not None:
            Finalize(None, _end, exitpriority=10)  # multiprocessing's children exit without atexit's handlers
        return _group


_print_error = sys.excepthook
"""Prints the traceback of the script's error."""


def _report_errors_once() -> None:
    global _print_error
    if sys.excepthook is not _report:
        _print_error, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the script's error to the other ranks; print it in full on the rank that failed first, else one line."""
    group = _group
    if group is None or group.size == 1 or hasattr(sys, "ps1"):
        _print_error(kind, error, trace)
        return
    own = group.describe_failure(error)
    if not group.destroyed:
        group.abort(own)
    # The rank that failed first prints its traceback; tracebacks of the others, which only waited, would hide it.
    if group.failure in (None, own):
        _print_error(kind, error, trace)
    else:
        sys.stderr.write(f"{kind.__name__}: {own}\n" if isinstance(error, CaffepyError) else f"{own}\n")


def is_available() -> bool:
    """Return True: process groups need no optional package."""
    return True


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


def destroy_process_group(group: AnyGroup = None) -> None:
    """Leave a group; None: the default group and all others. Rank 0 waits for the others, at most for the timeout."""
    if not isinstance(group, GroupMember):
        (group or get_group()).destroy()


def new_group(
    ranks: Sequence[int] | None = None, timeout: float | timedelta | None = None, backend: str | None = None
) -> ProcessGroup | GroupMember:
    """Create a group of some ranks of the default group. Called by all ranks of the default group, in the same order.

    Leaving the default group leaves the new group too.

    Args:
        ranks: the members, sorted for their new ranks; None: all.
        timeout: longest wait of any operation, in seconds; None: as in the default group.
        backend: as in `init_process_group`; None: as in the default group. ``nccl`` uses the current GPU of each rank.

    Returns:
        The group; `GroupMember.NON_GROUP_MEMBER` on ranks that are not its members, where operations with this
        ``group=`` do nothing.

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
        return GroupMember.NON_GROUP_MEMBER
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
    from caffepy.distributed.communicators.nccl import current_gpu

    return current_gpu()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of a group's backend."""
    return (group or get_group()).backend


def get_rank(group: AnyGroup = None) -> int:
    """Return this process's rank in a group, from 0; -1 if it is not a member."""
    return -1 if isinstance(group, GroupMember) else (group or get_group()).rank


def get_world_size(group: AnyGroup = None) -> int:
    """Return the number of processes of a group; -1 if this process is not a member."""
    return -1 if isinstance(group, GroupMember) else (group or get_group()).size


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
    """Leave the group at the script's exit, or report its error to the others."""
    # MPI ranks with an abandoned operation would block in MPI_Finalize, so they exit at once.
    group = _group
    error = None if hasattr(sys, "ps1") else (sys.exception() or getattr(sys, "last_value", None))
    if group is None:
        if _refused and error is None:
            left()
        return
    if not group.destroyed:
        if group.failure is not None:
            group.abort(group.failure)
        elif error is not None and not isinstance(error, SystemExit):
            group.abort(group.describe_failure(error))
        else:
            group.destroy()
    # After a failure MPI_Finalize would wait for ranks that may be stuck: all are ended.
    if group.failure is not None:
        group.end_world()
    left()
