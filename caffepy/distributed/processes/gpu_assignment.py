"""Which rank takes which GPUs of its host."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caffepy.distributed.processes.world import World, kernel_of
from caffepy.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuClaim:
    """The GPUs that a rank names, or sees where it names none.

    Args:
        rank: the rank.
        host: the name of its host.
        gpus: the rank's number for each GPU, by the GPU's identity, in the rank's order. Numbers depend on
            `CUDA_VISIBLE_DEVICES`, which may differ from rank to rank.
        named: the command line or the program names these GPUs.
    """

    rank: int
    host: str
    gpus: dict[str, int]
    named: bool

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (GPUs {_listed(self.gpus.values())})"


def assign_gpus(world: World, devices: list[int] | None, named: bool) -> list[int] | None:
    """The numbers of the GPUs that this rank takes among the GPUs that it names or sees; called by all ranks.

    Args:
        world: the processes.
        devices: numbers of the GPUs; None: the rank computes on the CPU.
        named: whether the command line or the program names them; if not, GPUs that do not divide equally stay idle.

    Raises:
        ConfigError: as `own_part`; on the root, see `World.raise_on_all`.
    """
    if world.size == 1 or None in world.all_gather(devices):
        return devices
    numbers = devices or []

    def identities() -> list[tuple[int, str]]:
        from caffepy.distributed.communicators.nccl import gpu_identity

        return [(number, gpu_identity(number)) for number in numbers]

    return share_gpus(world, world.run_on_all(identities), named)


def share_gpus(world: World, seen: Sequence[tuple[int, str]], named: bool = False) -> list[int]:
    """As `assign_gpus`, given number and identity of each GPU that this rank names or sees."""
    gpus = {identity: number for number, identity in seen}
    claims = world.all_gather(GpuClaim(world.rank, world.host, gpus, named))
    kernels = [kernel_of(machine) for machine in world.machines]
    neighbours = [claim for claim in claims if kernels[claim.rank] == kernels[world.rank]]
    part = world.run_on_all(lambda: own_part(neighbours, neighbours.index(claims[world.rank])))
    devices = [gpus[identity] for identity in part]
    _log(world, kernels, devices)
    idle = len(gpus) - len(devices) * sum(claim.gpus.keys() == gpus.keys() for claim in neighbours)
    if idle > 0:
        logger.warning("%d of the %d GPUs of %s stay idle: ranks get equal parts", idle, len(gpus), world.host)
    return devices


def own_part(claims: Sequence[GpuClaim], index: int) -> list[str]:
    """The identities of the GPUs that one of a host's ranks takes.

    Ranks with the same GPUs divide them in the order of the ranks, equal parts; a rank with GPUs of its own, as a batch
    system or a script deals them out, takes these.

    Args:
        claims: of the host's ranks.
        index: which of them.

    Raises:
        ConfigError: two ranks have some GPUs in common but not all; there are fewer GPUs than ranks; GPUs that are
            named cannot be divided equally.
    """
    own = claims[index]
    sharing = [claim for claim in claims if claim.gpus.keys() == own.gpus.keys()]
    for other in claims:
        common = [identity for identity in own.gpus if identity in other.gpus]
        if common and other not in sharing:
            first, second = sorted((own, other), key=lambda claim: claim.rank)
            raise ConfigError(
                f"{first} and {second} have the GPU at {common[0]} in common, but not all: give the ranks of a host "
                "the same --gpus list, which they divide among themselves, or lists without a common GPU"
            )
    count, ranks = len(own.gpus), len(sharing)
    if count < ranks or (count % ranks and any(claim.named for claim in sharing)):
        first = sharing[0]
        numbers = _listed(claim.rank for claim in sharing)
        raise ConfigError(
            f"{first.host} has {ranks} ranks ({numbers}) for {count} GPU{'s' * (count != 1)} "
            f"({_listed(first.gpus.values())}): {_fitting(count)}; start as many on that host, name other GPUs with "
            "--gpus, or train on the CPU with --cpu"
        )
    each, place = count // ranks, sharing.index(own)
    return list(sharing[0].gpus)[place * each : (place + 1) * each]


def _fitting(count: int) -> str:
    """How many ranks can divide so many GPUs equally, as a clause."""
    *fewer, most = (ranks for ranks in range(1, count + 1) if count % ranks == 0)
    return f"{', '.join(map(str, fewer))} or {most} ranks fit" if fewer else f"{most} rank fits"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _log(world: World, kernels: Sequence[str], devices: list[int]) -> None:
    """Log which rank has which GPUs, one line for each host of several ranks."""
    devices_of_all = world.all_gather(devices)
    hosts: dict[str, list[int]] = {}
    for rank, kernel in enumerate(kernels):
        hosts.setdefault(kernel, []).append(rank)
    for ranks in hosts.values():
        if len(ranks) > 1:
            parts = (f"rank {rank} takes {_listed(devices_of_all[rank])}" for rank in ranks)
            logger.info("GPUs of %s: %s", world.hosts[ranks[0]], "; ".join(parts))
