"""CPU cores and GPUs of this process: its CPU mask, the cores near a GPU, and which rank takes which GPUs of its host.

Launchers bind a rank to one core, which starves solver threads and NCCL's own threads.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.errors import ConfigError
from caffepy.utils.options import whole

if TYPE_CHECKING:
    from caffepy.distributed.processes.world import World

logger = logging.getLogger(__name__)


# -- cores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use.

    Args:
        numbers: their numbers, ascending.
        count: how many of them may be busy at a time; less than there are where a container has a quota.
    """

    numbers: tuple[int, ...]
    count: int


def current_cores() -> Cores:
    """The cores that this process may use now."""
    numbers = _affinity()
    return Cores(numbers, _within_quota(len(numbers)))


def take_cores(local_rank: int, local_size: int, divide: bool) -> Cores:
    """Widen this process's CPU mask to all cores that machine and container allow, and log it.

    Args:
        local_rank: this process's number among the ranks of its host.
        local_size: the number of ranks on this host.
        divide: give each rank its own share of the cores (training on the CPU). Ranks with GPUs share all cores: their
            solver threads mostly wait.
    """
    narrow = _affinity()
    # Asked for more than may be allowed: the kernel cuts the mask down to the container's cores, which reading it back
    # shows.
    _set_affinity(_online())
    wide = _affinity()
    quota = _within_quota(len(wide))
    numbers, count = wide, quota
    if divide and local_size > 1:
        count = max(1, quota // local_size)
        # With a quota the kernel counts time, not cores: ranks share all cores, and each keeps few of them busy.
        if quota == len(wide) >= local_size:
            numbers = share(wide, local_rank, local_size)
            count = len(numbers)
            _set_affinity(numbers)
    logger.info(
        "CPU cores of this process: %s (%d busy at a time), started with %s",
        format_cores(numbers),
        count,
        format_cores(narrow),
    )
    return Cores(numbers, count)


def cores_near(bus_id: str, system: Path = Path("/sys")) -> tuple[int, ...]:
    """The numbers of the CPU cores near a PCI device, e.g. ``0000:1B:00.0``; empty where Linux does not say."""
    try:
        return parse_cores((pci_folder(bus_id, system) / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()


def pci_folder(bus_id: str, system: Path) -> Path:
    """What Linux shows of a PCI device."""
    return system / "bus/pci/devices" / bus_id.lower()


def bind_near_gpu(bus_id: str, label: str, system: Path = Path("/sys")) -> tuple[int, ...]:
    """Keep the calling thread, and threads that it starts, on its cores near its GPU; logged.

    Returns the cores; none where nothing is known of the GPU or none of them may be used, and nothing is bound then.

    Args:
        bus_id: the GPU's PCI address, with a domain of four digits.
        label: what the log calls the GPU.
        system: where Linux shows its devices.
    """
    near = cores_near(bus_id, system)
    allowed = _affinity()
    cores = tuple(core for core in near if core in allowed)
    try:
        if not cores or not hasattr(os, "sched_setaffinity"):
            raise OSError(f"cores near it: {format_cores(near) or '?'}")
        os.sched_setaffinity(0, cores)
    except OSError as error:  # a container may forbid it
        logger.debug("GPU %s (%s): its thread is not bound; %s", label, bus_id, error)
        return ()
    logger.info("GPU %s (%s): its thread runs on the CPU cores near it, %s", label, bus_id, format_cores(cores))
    return cores


def share(cores: tuple[int, ...], index: int, parts: int) -> tuple[int, ...]:
    """Part `index` of `parts` nearly equal, contiguous parts."""
    return cores[len(cores) * index // parts : len(cores) * (index + 1) // parts]


def format_cores(cores: tuple[int, ...]) -> str:
    """Core numbers as Linux writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parse_cores(text: str) -> tuple[int, ...]:
    """The inverse of `format_cores`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _affinity() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _set_affinity(cores: tuple[int, ...]) -> None:
    """Move every thread of this process: Linux keeps a mask a thread, and BLAS has started its own by now."""
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        threads = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        threads = [0]
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError as error:  # a thread that has ended, or a container that forbids it
            logger.debug("CPU mask of thread %d stays unchanged: %s", thread, error)


def _online() -> tuple[int, ...]:
    try:
        return parse_cores(Path("/sys/devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        return tuple(range(os.cpu_count() or 1))


def _within_quota(cores: int) -> int:
    """Cores that the control group lets be busy: `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1)."""
    group = Path("/sys/fs/cgroup")
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cores
    allowed, in_time = whole(quota, most=1 << 62), whole(period, 1)
    if allowed is None or in_time is None:  # "max", or -1
        return cores
    return max(1, min(cores, math.ceil(allowed / in_time)))


# -- GPUs ----------------------------------------------------------------------------------------------


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
    kernels = [_kernel_of(machine) for machine in world.machines]
    # Ranks in containers of one machine have other host names, and still share its GPUs.
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


def _kernel_of(machine: str) -> str:
    """The part of a `machine_identity` that the containers of one machine have in common: they share its GPUs."""
    return machine.partition("/")[0]


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
