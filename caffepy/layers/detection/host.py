"""What layers that compute on the host share."""

from __future__ import annotations

import logging

from caffepy.backend.cpu.jit.cpus import cpu_count
from caffepy.layers.core.base import Layer

logger = logging.getLogger(__name__)


def host_threads(layer: Layer) -> int:
    """How many CPU threads a layer may use: its backend's own, or on a GPU its device's part of the process's cores."""
    return layer.backend.threads or max(cpu_count() // max(layer.context.shard.devices_per_rank, 1), 1)


def warn(layer: Layer, message: str) -> None:
    """Log a warning that names the layer, once among all devices."""
    if layer.context.shard.rank == 0 and layer.backend.holds_values:
        logger.warning("layer '%s' (%s): %s", layer.name, layer.type, message)
