"""What the root says of a run: before training how batches are divided, after it the performance and the trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError
from caffepy.files import check_writable
from caffepy.parallel.processes.world import World
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.report import Performance, format_report
from caffepy.trace import pack_events, unpack_events, write_trace

logger = logging.getLogger(__name__)


def check_trace(path: Path | None, rank: int) -> None:
    """Refuse, before training, a trace that the root could not write after it.

    Raises:
        ConfigError: on the root, if the folder does not exist.
        RunError: on the root, if the file cannot be written.
    """
    if rank != 0 or path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}; make it first")
    check_writable(path)


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
    if shard.per_device_batch or device_batch * devices == batch_size:
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
    logger.info(
        "Batch: %d per device, %d per rank, %d in all", batch, batch * shard.devices_per_rank, batch * shard.world_size
    )


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
