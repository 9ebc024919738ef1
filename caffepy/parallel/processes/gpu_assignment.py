"""Which rank takes which GPUs of a machine, where the command line does not say."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from caffepy.errors import ConfigError
from caffepy.parallel.processes.machine import kernel_of
from caffepy.parallel.processes.world import World

logger = logging.getLogger(__name__)


def share_gpus(world: World, seen: Sequence[tuple[int, str]]) -> list[int]:
    """This rank's part of the GPUs of its machine; called by all ranks.

    Args:
        world: the processes.
        seen: index and identity of each GPU that is visible to this process.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or the ranks see different ones that overlap; on the root, see
            `World.raise_on_all`.
    """
    views_of_all = world.all_gather([identity for _, identity in seen])
    kernels = [kernel_of(machine) for machine in world.machines]
    neighbours = [rank for rank in range(world.size) if kernels[rank] == kernels[world.rank]]
    views = [views_of_all[rank] for rank in neighbours]
    own = neighbours.index(world.rank)
    part = world.run_on_all(lambda: own_part(views, own, [world.name(rank) for rank in neighbours]))
    numbers = {identity: number for number, identity in seen}
    devices = [numbers[identity] for identity in part]
    _log(world, devices, len(seen))
    return devices


def own_part(views: Sequence[Sequence[str]], index: int, names: Sequence[str]) -> list[str]:
    """The identities of the GPUs that one of a machine's ranks takes.

    Where all ranks see the same GPUs each takes an even part of them; where no two see the same one, as when a batch
    system or a script has dealt them out, each takes what it sees.

    Args:
        views: the identities of the GPUs that each rank sees.
        index: which of the ranks.
        names: what messages call the ranks.

    Raises:
        ConfigError: fewer GPUs than ranks, or views that overlap.
    """
    if all(set(view) == set(views[0]) for view in views):
        each = len(views[0]) // len(views)
        if each == 0:
            raise ConfigError(
                f"{', '.join(names)} are {len(views)} ranks for {len(views[0])} GPUs: start fewer on that host, or "
                "train on the CPU with --cpu"
            )
        return list(views[0][index * each : (index + 1) * each])
    for other, view in enumerate(views):
        if common := sorted(set(view) & set(views[index])) if other != index else []:
            raise ConfigError(
                f"{names[min(index, other)]} and {names[max(index, other)]} both see the GPU at {common[0]}, but do "
                "not see the same GPUs: give every rank its own with --gpus, or let all see all"
            )
    return list(views[index])


def refuse_shared(world: World, own: Sequence[str]) -> None:
    """Refuse two ranks of one machine that train on the same GPU; called by all ranks.

    Args:
        world: the processes.
        own: the identities of this rank's GPUs.

    Raises:
        ConfigError: with both ranks; on the root, see `World.raise_on_all`.
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, (machine, gpus) in enumerate(zip(world.machines, world.all_gather(list(own)), strict=True)):
        for gpu in gpus:
            owner = owners.setdefault((kernel_of(machine), gpu), rank)
            if owner != rank:
                error = ConfigError(
                    f"{world.name(owner)} and {world.name(rank)} both train on the GPU at {gpu}: "
                    f"give each rank GPUs of its own with --gpu"
                )
                world.raise_on_all(error)


def _log(world: World, devices: list[int], seen: int) -> None:
    """Log which rank has which GPUs, one line for each machine."""
    devices_of_all = world.all_gather(devices)
    machines: dict[str, list[int]] = {}
    for rank, machine in enumerate(world.machines):
        machines.setdefault(machine, []).append(rank)
    for ranks in machines.values():
        parts = (f"rank {rank} takes {','.join(map(str, devices_of_all[rank]))}" for rank in ranks)
        logger.info("GPUs of %s: %s", world.hosts[ranks[0]], "; ".join(parts))
    idle = seen - len(devices) * world.local_size
    if idle > 0:
        logger.warning("%d of the %d GPUs of %s stay idle: ranks get equal parts", idle, seen, world.host)
