"""The log's beginning, from which a run can be made again: versions, hosts, devices, transports, solver and nets."""

from __future__ import annotations

import logging
import os

import numpy as np

from caffepy.config.paths import PathResolver
from caffepy.config.run_log import describe_solver
from caffepy.errors import CaffepyError
from caffepy.parallel.hardware.nvml import open_nvml
from caffepy.parallel.hardware.transports import Place, describe_devices, gpu_links
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.processes.world import World

logger = logging.getLogger(__name__)


def log_run(world: World, options: TrainOptions) -> None:
    """Log what is about to run, on the root; called by the main thread of all ranks.

    Args:
        world: the processes.
        options: as all have agreed on them.
    """
    own = _own_places(world, options)
    places = [place for rank in world.all_gather(own) for place in rank]
    links = world.all_gather(_own_links(world, places))
    if world.rank != 0:
        return
    versions = f"NumPy {np.__version__}"
    if options.devices is not None:
        from caffepy.parallel.hardware.nccl_info import nccl_version

        versions += f", NCCL {nccl_version()}"
    logger.info("%s; %d process%s in %s", versions, world.size, "es" if world.size > 1 else "", os.getcwd())
    for line in describe_devices(places, dict(filter(None, links))):
        logger.info("%s", line)
    try:
        lines = list(describe_solver(options.solver, options.resolve or PathResolver(None)))
    except CaffepyError:  # a net that cannot be read: all ranks will say so when they build it
        return
    for line in lines:
        logger.info("%s", line)


def _own_places(world: World, options: TrainOptions) -> list[Place]:
    machine = world.machines[world.rank]
    if options.devices is None:
        count = options.cpu_solvers
        names = [f"CPU solver {index}" if count > 1 else "CPU" for index in range(count)]
        return [Place(world.rank, world.host, machine, None, name) for name in names]
    from caffepy.parallel.communicators.nccl import gpu_identity

    return [Place(world.rank, world.host, machine, gpu_identity(device), f"GPU {device}") for device in options.devices]


def _own_links(world: World, places: list[Place]) -> tuple[str, dict[tuple[str, str], str]] | None:
    """The links between this machine's GPUs, if this is its first rank."""
    machine = world.machines[world.rank]
    gpus = [place.bus_id for place in places if place.machine == machine and place.bus_id is not None]
    if world.local_rank != 0 or not gpus:
        return None
    with open_nvml() as nvml:
        return machine, gpu_links(gpus, nvml)
