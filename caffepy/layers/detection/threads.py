"""Thread count and warnings of layers that compute on the host."""

from __future__ import annotations

import logging

from caffepy.backend.cpu.jit.cpus import cpu_count
from caffepy.layers.layer import Layer

logger = logging.getLogger(__name__)


def host_threads(layer: Layer) -> int:
    """Return the number of CPU threads: the CPU backend's, or with a GPU the device's share of the process's cores."""
    return layer.backend.threads or max(cpu_count() // max(layer.context.shard.devices_per_rank, 1), 1)


def warn(layer: Layer, message: str) -> None:
    """Log a warning that names the layer, on rank 0 only."""
    if layer.context.shard.rank == 0 and layer.backend.holds_values:
        logger.warning("%s: %s", layer.where, message)
