"""The log's beginning, from which a run can be made again: versions, hosts, devices, transports, solver and nets."""

from __future__ import annotations

import logging

import numpy as np

from caffepy.config.paths import PathResolver
from caffepy.config.run_log import describe_solver
from caffepy.errors import CaffepyError
from caffepy.files import working_folder
from caffepy.parallel.hardware.nvml import open_nvml
from caffepy.parallel.hardware.transports import Device, describe_devices, gpu_links
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.processes.world import World

logger = logging.getLogger(__name__)


def log_run(world: World, options: TrainOptions) -> None:
    """Log what is about to run, on the root; called by the main thread of all ranks.

    Args:
        world: the processes.
        options: as all have agreed on them.
    """
    own = _own_devices(world, options)
    devices = [device for rank in world.all_gather(own) for device in rank]
    links = world.all_gather(_own_links(world, devices))
    if world.rank != 0:
        return
    versions = f"NumPy {np.__version__}"
    if options.devices is not None:
        from caffepy.parallel.hardware.nccl_info import nccl_version

        versions += f", NCCL {nccl_version()}"
    logger.info("%s; %d process%s in %s", versions, world.size, "es" if world.size > 1 else "", working_folder())
    for line in describe_devices(devices, dict(filter(None, links))):
        logger.info("%s", line)
    try:
        lines = list(describe_solver(options.solver, options.resolve or PathResolver(None)))
    except CaffepyError:  # a net that cannot be read: all ranks will say so when they build it
        return
    for line in lines:
        logger.info("%s", line)


def _own_devices(world: World, options: TrainOptions) -> list[Device]:
    machine = world.machines[world.rank]
    if options.devices is None:
        count = options.cpu_solvers
        names = [f"CPU solver {index}" if count > 1 else "CPU" for index in range(count)]
        return [Device(world.rank, world.host, machine, None, name) for name in names]
    from caffepy.parallel.communicators.nccl import gpu_identity

    return [
        Device(world.rank, world.host, machine, gpu_identity(device), f"GPU {device}") for device in options.devices
    ]


def _own_links(world: World, devices: list[Device]) -> tuple[str, dict[tuple[str, str], str]] | None:
    """The links between this machine's GPUs, if this is its first rank."""
    machine = world.machines[world.rank]
    gpus = [device.bus_id for device in devices if device.machine == machine and device.bus_id is not None]
    if world.local_rank != 0 or len(gpus) < 2:
        return None  # and NVML need not be loaded
    with open_nvml() as nvml:
        return machine, gpu_links(gpus, nvml)
