"""Says how the batches of a prototxt are divided among devices (NVIDIA Caffe's `divide_batch_size`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from caffepy.data.schedule import Shard
from caffepy.proto.caffe_pb2 import NetParameter

logger = logging.getLogger(__name__)


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
    """Log the batch per device, per rank and in all, with a warning for each batch that was rounded up.

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
