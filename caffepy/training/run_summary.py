"""What the root logs of a run: at first all from which it can be made again, then the batch, at the end the performance
of all devices; and their trace as a file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from caffepy.data.sharding import Shard
from caffepy.distributed.nvml import Nvml, open_nvml
from caffepy.distributed.placement import format_cores
from caffepy.distributed.processes.world import World
from caffepy.errors import CaffepyError, ConfigError
from caffepy.formats.logged_solver import describe_solver, inline_nets, read_movable_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import NetParameter
from caffepy.logs.performance_report import Performance, format_report
from caffepy.logs.trace import MARK, pack_events, unpack_events, write_trace
from caffepy.training.options import TrainOptions
from caffepy.utils.files import atomic_write, check_output, working_folder

logger = logging.getLogger(__name__)

_SAVED = "# Written by caffepy train.\n"
"""The first line of a saved solver; a file that lacks it is the user's."""


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
        from caffepy.distributed.nccl_info import nccl_version

        versions += f", NCCL {nccl_version()}"
    logger.info("%s; %d process%s in %s", versions, world.size, "es" if world.size > 1 else "", working_folder())
    for line in describe_devices(devices, dict(filter(None, links))):
        logger.info("%s", line)
    try:
        lines = list(describe_solver(options.solver, options.resolve or PathResolver(None)))
    except CaffepyError:  # a net that cannot be read: all ranks report it when they build it
        return
    for line in lines:
        logger.info("%s", line)


def save_solver(options: TrainOptions) -> None:
    """Write the solver with its nets beside its snapshots, as ``PREFIX_solver.prototxt``; for the root.

    Often the user's own solver has this name: a file that no training wrote stays, with a warning, and so does the
    solver that this training reads.

    Raises:
        CaffepyError: a net cannot be read, or the file cannot be written.
    """
    resolve = options.resolve or PathResolver(None)
    path = resolve.output(f"{options.solver.snapshot_prefix}_solver.prototxt")
    try:
        check_output(path, options.overwrite, filter(None, [resolve.prototxt]), _SAVED.encode())
    except ConfigError as error:
        logger.warning("the solver with its nets and the fields that options set is not saved: %s", error)
        return
    merged = inline_nets(options.solver, resolve, read_movable_net)
    with atomic_write(path) as file:
        file.write(f"{_SAVED}{text_format.MessageToString(merged, as_utf8=True)}".encode())
    logger.info("Wrote the solver with its nets and the fields that options set to %s", path)


def _own_devices(world: World, options: TrainOptions) -> list[Device]:
    machine = world.machines[world.rank]
    if options.devices is None:
        count = options.cpu_solvers
        names = [f"CPU solver {index}" if count > 1 else "CPU" for index in range(count)]
        return [Device(world.rank, world.host, machine, None, name) for name in names]
    from caffepy.distributed.communicators.nccl import gpu_identity, gpu_name

    return [
        # NVIDIA Caffe's log tools count the GPUs by this name.
        Device(world.rank, world.host, machine, gpu_identity(device), f"GPU {device}: {gpu_name(device)}")
        for device in options.devices
    ]


def _own_links(world: World, devices: list[Device]) -> tuple[str, dict[tuple[str, str], str]] | None:
    """The links between this machine's GPUs, if this is its first rank."""
    machine = world.machines[world.rank]
    gpus = [device.bus_id for device in devices if device.machine == machine and device.bus_id is not None]
    if world.local_rank != 0 or len(gpus) < 2:
        return None  # and NVML need not be loaded
    with open_nvml() as nvml:
        return machine, gpu_links(gpus, nvml)


def check_trace(path: Path | None, rank: int, overwrite: bool = False) -> None:
    """Refuse, before training, a trace that the root could not write after it.

    Raises:
        ConfigError: on the root, if the folder does not exist, or the file exists, is no trace and `overwrite` is off.
        RunError: on the root, if the file cannot be written.
    """
    if rank != 0 or path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}; make it first")
    check_output(path, overwrite, mark=MARK)


def check_picture(path: Path | None, rank: int, overwrite: bool) -> None:
    """Refuse, before a learning-rate test, a picture that would replace a file.

    Raises:
        ConfigError: on the root, if the file exists and `overwrite` is off.
        RunError: on the root, if the file cannot be written.
    """
    if rank == 0 and path is not None:
        check_output(path, overwrite)


def batch_sizes(net: NetParameter) -> Iterator[tuple[str, int]]:
    """The name and `batch_size` of each layer that has one, as written."""
    for layer in net.layer:
        for field, settings in layer.ListFields():
            message = field.message_type
            if message is not None and "batch_size" in message.fields_by_name and settings.batch_size > 0:
                yield layer.name, int(settings.batch_size)


def division_warning(layer: str, batch_size: int, shard: Shard) -> str | None:
    """The warning if a rank's batch is not divisible by its devices, or None."""
    devices = shard.devices_per_rank
    device_batch = shard.device_batch(batch_size)
    if shard.per_device_batch or shard.undivided or device_batch * devices == batch_size:
        return None
    return (
        f"layer '{layer}': batch_size {batch_size} is not divisible by {devices} devices: each takes {device_batch}, "
        f"{device_batch * devices} together"
    )


def describe_batch(net: NetParameter, batch: int, shard: Shard) -> None:
    """Log the batch per device, per rank and in all, with a warning for each that was rounded up (`divide_batch_size`).

    Args:
        net: with each layer's `batch_size` as written.
        batch: samples that a device takes in one iteration.
        shard: the device's.
    """
    for layer, batch_size in batch_sizes(net):
        if warning := division_warning(layer, batch_size, shard):
            logger.warning("%s", warning)
    per_rank = batch if shard.undivided else batch * shard.devices_per_rank
    logger.info("Batch: %d per device, %d per rank, %d in all", batch, per_rank, batch * shard.parts)


def report_performance(world: World, devices: Sequence[Performance], single_rate: float | None) -> None:
    """Log the performance of all devices on the root, given this rank's; called by all ranks.

    Args:
        world: the processes.
        devices: of this rank's devices.
        single_rate: images a second of one device that trains alone; None: not known.
    """
    ranks = world.all_gather(list(devices))
    if world.rank == 0:
        for line in format_report(ranks, single_rate):
            logger.info("%s", line)


def gather_trace(world: World, path: Path | None, devices: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Write the events of all devices into one file on the root, given this rank's; called by all ranks.

    Args:
        world: the processes.
        path: the file; None: there is no trace.
        devices: the events of each of this rank's devices.
    """
    if path is None:
        return
    gathered = world.all_gather(pack_events(devices))
    if world.rank == 0:
        spans = write_trace(path, (device for rank in gathered for device in unpack_events(rank)))
        if spans == 0:
            logger.warning("%s is empty: no iteration of --trace-iterations was trained", path)
        else:
            logger.info("Wrote a trace of %d spans to %s: open it in https://ui.perfetto.dev", spans, path)


Links = Mapping[tuple[str, str], str]
"""What connects two GPUs of a machine, by their PCI addresses."""


@dataclass(frozen=True)
class Device:
    """A device, and where it is.

    Args:
        rank: its process.
        host: as people call its machine.
        machine: its `machine_identity`.
        bus_id: a GPU's PCI address; None: a CPU solver.
        name: device and model, e.g. ``GPU 0: NVIDIA H100 80GB HBM3``.
    """

    rank: int
    host: str
    machine: str
    bus_id: str | None
    name: str


def gpu_links(bus_ids: Sequence[str], nvml: Nvml | None) -> dict[tuple[str, str], str]:
    """What connects each two GPUs of this machine: ``NVLink``, ``PCIe``, or ``shared memory`` of the host where
    neither reads the other's. Empty where the driver's library cannot be asked.
    """
    if nvml is None:
        return {}
    links = {}
    for first, counts in zip(bus_ids, nvml.link_counts(bus_ids), strict=True):
        for second, count in zip(bus_ids, counts, strict=True):
            links[first, second] = "NVLink" if count else "PCIe" if nvml.reads(first, second) else "shared memory"
    return links


def transport(first: Device, second: Device, links: Mapping[str, Links]) -> str:
    """What lies between two devices.

    Args:
        first: one.
        second: the other.
        links: between the GPUs of each machine.
    """
    if first.machine != second.machine:
        return "network"
    if first.bus_id is not None and second.bus_id is not None:
        return links.get(first.machine, {}).get((first.bus_id, second.bus_id), "PCIe or NVLink")
    return "memory of one process" if first.rank == second.rank else "shared memory"


def describe_devices(devices: Sequence[Device], links: Mapping[str, Links]) -> Iterator[str]:
    """Lines: each device, then for each kind of transport the pairs of devices that have it."""
    for number, device in enumerate(devices):
        where = f", PCI {device.bus_id}" if device.bus_id is not None else ""
        yield f"Device {number}: rank {device.rank} on {device.host}, {device.name}{where}"
    found: dict[str, dict[int, list[int]]] = {}
    for i, first in enumerate(devices):
        for j in range(i + 1, len(devices)):
            found.setdefault(transport(first, devices[j], links), {}).setdefault(i, []).append(j)
    for kind, pairs in found.items():
        text = "; ".join(f"{i} and {format_cores(tuple(others))}" for i, others in pairs.items())
        yield f"Transport {kind} between devices {'of all pairs' if len(found) == 1 else text}"
