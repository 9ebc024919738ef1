"""What all ranks show after training: the performance report and the trace, gathered and written by the root."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.parallel.processes.world import World
from caffepy.report import Performance, format_report
from caffepy.trace import pack_events, unpack_events, write_trace

logger = logging.getLogger(__name__)


def check_trace(path: Path | None, rank: int) -> None:
    """Refuse, before training, a trace that the root could not write after it.

    Raises:
        ConfigError: on the root, if the folder does not exist.
    """
    if rank == 0 and path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--trace {path}: there is no folder {path.parent}; make it first")


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
