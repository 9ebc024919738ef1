"""Makes the communicators of this process's devices: threads of one process, ranks under MPI, GPUs under NCCL."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from caffepy.parallel.communicators.communicator import Communicator, GroupCommunicator
from caffepy.parallel.communicators.hierarchical import HierarchicalCommunicator
from caffepy.parallel.communicators.local import LocalCommunicator, LocalGroup
from caffepy.parallel.communicators.shared_memory import SharedSums
from caffepy.parallel.processes.world import World
from caffepy.parallel.shared_scores import SharedScores

logger = logging.getLogger(__name__)


def connect_devices(
    world: World, count: int, on_gpus: bool, compress: str = "none", timeout: float = 300.0
) -> Callable[[int], Communicator]:
    """What makes the communicator of each of this rank's devices; called by the main thread of all ranks.

    Args:
        world: the processes.
        count: devices of this rank, as many as every rank has.
        on_gpus: the devices are GPUs.
        compress: how gradients travel between ranks, one of `options.COMPRESSIONS`.
        timeout: longest wait for another thread, in seconds.

    Returns:
        A function of a device's number in this process, which every device calls in its own thread.

    Raises:
        CaffepyError: NCCL cannot be used here; on the root, see `World.raise_on_all`.
    """
    group = LocalGroup(count, timeout, SharedScores(count))
    ranks = world.communicator()
    unique_id = _nccl_unique_id(world) if on_gpus and count * world.size > 1 else None
    inter_node = world.several_hosts
    shared = None
    if ranks is not None and unique_id is None and not inter_node and compress == "none":
        shared = _shared_sums(world, ranks)
    if compress != "none" and unique_id is None and ranks is None and world.rank == 0:
        logger.info("--compression %s changes nothing: there is no other rank to send gradients to", compress)

    def connect(index: int) -> Communicator:
        local = LocalCommunicator(group, index)
        host: Communicator = local
        if ranks is not None:
            host = HierarchicalCommunicator(local, ranks, compress, inter_node, shared)
        if unique_id is None:
            return host
        from caffepy.parallel.communicators.nccl import NcclCommunicator

        return NcclCommunicator(host.size, unique_id, host.rank, host, compress)

    return connect


def _shared_sums(world: World, ranks: GroupCommunicator) -> SharedSums:
    """Sums in memory that the ranks of one host share."""
    arrived, added = world.communicator(), world.communicator()
    assert arrived is not None and added is not None
    return SharedSums(ranks, arrived, added)


def _nccl_unique_id(world: World) -> Any:
    """Rank 0's ncclUniqueId, which MPI broadcasts."""
    from caffepy.parallel.communicators.nccl import check_nccl, new_unique_id

    world.run_on_all(check_nccl)
    return world.broadcast(new_unique_id() if world.rank == 0 else None)
