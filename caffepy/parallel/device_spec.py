"""The devices of this process: number, label, CPU threads and part of the data of each."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.data.schedule import Shard
from caffepy.parallel.hardware.affinity import Cores, current_cores, take_cores
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.parallel.processes.world import World

_TRAININGS = itertools.count(1)


@dataclass(frozen=True)
class DeviceSpec:
    """One device of this process.

    Args:
        index: its number in this process.
        device: its GPU, or None for the CPU.
        label: what messages and the report call it.
        threads: its CPU threads; None leaves the number to the backend.
        shard: its part of the data; holds its number among all devices.
    """

    index: int
    device: int | None
    label: str
    threads: int | None
    shard: Shard

    @property
    def full_name(self) -> str:
        """The device as the trace calls it: ``rank 1 on host7: GPU 0``."""
        device = self.label if self.device is None else f"GPU {self.label}"
        return f"rank {self.shard.rank // self.shard.devices_per_rank} on {socket.gethostname()}: {device}"


def device_specs(world: World, options: TrainOptions, cores: Cores) -> list[DeviceSpec]:
    """The devices that this rank trains with; its CPU solvers divide `cores` unless the options say how many to use."""
    devices = options.local_devices
    count = len(devices)
    threads = options.threads or max(1, cores.count // count)
    training = next(_TRAININGS)
    return [
        DeviceSpec(
            index,
            device,
            _label(index, device, count),
            threads if device is None else None,
            Shard(world.rank * count + index, world.size * count, count, options.batch == "per-device", training),
        )
        for index, device in enumerate(devices)
    ]


def device_names(world: World, specs: Sequence[DeviceSpec]) -> list[str]:
    """What messages call each device of all ranks, given this rank's; called by all ranks."""
    several = world.size > 1
    return [
        f"{world.name(rank)}, device {label}" if several else f"device {label}"
        for rank, labels in enumerate(world.all_gather([spec.label for spec in specs]))
        for label in labels
    ]


def bind_rank(world: World, gpus: bool) -> Cores:
    """The cores of this rank: all that the process may use, or under a launcher those that the rank is bound to.

    Args:
        world: the processes.
        gpus: the rank computes on GPUs; then the ranks of a host share its cores.
    """
    if find_launcher() is None:
        return current_cores()
    return take_cores(world.local_rank, world.local_size, divide=not gpus)


def _label(index: int, device: int | None, count: int) -> str:
    if device is not None:
        return str(device)
    return f"CPU {index}" if count > 1 else "CPU"
