"""The options as all ranks use them: compared, and completed with what the root chooses."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from pathlib import Path

from caffepy.config.paths import PathResolver
from caffepy.errors import ConfigError
from caffepy.parallel.agreement import check_alike, describe_run
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.processes.gpu_assignment import assign_gpus
from caffepy.parallel.processes.world import World
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.snapshot.files import newest_snapshot

logger = logging.getLogger(__name__)


def agree_on_options(world: World, options: TrainOptions) -> TrainOptions:
    """Compare the ranks' options; called by the main thread of all ranks.

    Returns:
        This rank's options with its part of the GPUs, and with random seed, snapshot and weights of the root.

    Raises:
        ConfigError: the ranks' options do not go together; on the root, see `World.raise_on_all`.
    """
    options = replace(options, devices=assign_gpus(world, options.devices, named=not options.share_gpus))
    _compare_device_counts(world, options)
    if world.size > 1:
        check_alike(world, world.run_on_all(lambda: describe_run(options)))
    solver = SolverParameter()
    solver.CopyFrom(options.solver)
    if solver.random_seed < 0:
        solver.random_seed = secrets.randbelow(1 << 31)
    solver.random_seed = world.broadcast(solver.random_seed)
    snapshot = world.run_on_all(lambda: _start_snapshot(options) if world.rank == 0 else None)
    return replace(options, solver=solver, snapshot=world.broadcast(snapshot), weights=world.broadcast(options.weights))


def _compare_device_counts(world: World, options: TrainOptions) -> None:
    gpus = world.all_gather(None if options.devices is None else len(options.devices))
    counts = world.all_gather(len(options.local_devices))
    for rank in range(1, world.size):
        if gpus[rank] != gpus[0] or counts[rank] != counts[0]:
            error = ConfigError(
                f"ranks have different devices: {world.name(0)} has {_count(gpus[0], counts[0])}, "
                f"{world.name(rank)} has {_count(gpus[rank], counts[rank])}; give every rank as many"
            )
            world.raise_on_all(error)


def _count(gpus: int | None, devices: int) -> str:
    kind = "CPU solver" if gpus is None else "GPU"
    return f"{devices} {kind}{'s' if devices != 1 else ''}"


def _start_snapshot(options: TrainOptions) -> Path | None:
    """The snapshot to resume from; for the root."""
    since = options.resume_since
    if not options.resume_newest and since is None:
        return options.snapshot
    prefix = (options.resolve or PathResolver(None)).output(options.solver.snapshot_prefix)
    newest = newest_snapshot(prefix)
    if not options.resume_newest and (newest is None or newest.stat().st_mtime < (since or 0)):
        logger.info("no whole snapshot of this job with the prefix %s: it begins again as at first", prefix)
        return options.snapshot
    if newest is None:
        logger.info("no whole snapshot with the prefix %s: training starts from the beginning", prefix)
    return newest
