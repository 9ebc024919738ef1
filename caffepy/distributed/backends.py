"""Choice and connection of a group's communicator."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, wait

from caffepy.distributed.rendezvous import Membership
from caffepy.errors import PeerError, UserError
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.factory import connect_by_store, connect_gpu

BACKENDS = ("nccl", "mpi", "tcp")
_POLL_SECONDS = 0.2


def default_backend(membership: Membership) -> str:
    """Return ``mpi`` if MPI started the processes, else ``tcp``."""
    return "mpi" if membership.world is not None else "tcp"


def create_communicator(
    backend: str, membership: Membership, timeout: float, device: int | None = None
) -> Communicator:
    """Connect the group's ranks. Called by all ranks.

    Args:
        backend: one of `BACKENDS`.
        membership: the group's membership.
        timeout: longest wait in seconds.
        device: for ``nccl`` the GPU, which becomes current; None: assign the GPUs of a host to its ranks in order.

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
    from caffepy.parallel.communicators.nccl import gpu_identity, new_unique_id, use_gpu

    channel, rank, size = membership.channel, membership.rank, membership.size
    gpu = _choose_gpu(membership) if device is None else device
    use_gpu(gpu)
    unique_id = bytes(new_unique_id()) if rank == 0 else b""
    own = [membership.members[rank].machine, gpu_identity(gpu), unique_id.hex()]
    channel.put(f"gpu/{rank}", json.dumps(own).encode())
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
        if failure := channel.watch([], 0.0):
            raise PeerError(failure.message)
        if time.monotonic() > deadline:
            raise PeerError(f"NCCL has not connected the GPUs within {timeout:g} s")
    return made.result()


def _choose_gpu(membership: Membership) -> int:
    """Return this rank's GPU on its host; the only visible GPU if each rank sees one.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
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
