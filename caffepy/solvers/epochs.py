"""Training counted in epochs and in hours: which iterations end an epoch, how long something took."""

from __future__ import annotations

import math

from caffepy.errors import ConfigError
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import SolverParameter


def epochs_per_iteration(param: SolverParameter, net: Net) -> float | None:
    """The part of an epoch that all devices together take in one iteration; None without records to count.

    The number of devices is that of the net's shard, which is set again where a solver joins other processes.
    """
    sizes = [size for layer in net.layers if (size := layer.epoch_size()) is not None]
    return net.batch_size() * net.context.shard.world_size * param.iter_size / sizes[0] if sizes else None


def ends_of_last_epochs(param: SolverParameter, net: Net) -> frozenset[int]:
    """The iterations after which `test_and_snapshot_last_epochs` asks for a test and a snapshot.

    Epochs are counted back from max_iter, which ends the last one (NVIDIA Caffe's `Solver::Step`).

    Raises:
        ConfigError: no layer of the net knows how many records an epoch has.
    """
    count = param.test_and_snapshot_last_epochs
    if count <= 0:
        return frozenset()
    part = epochs_per_iteration(param, net)
    if part is None:
        raise ConfigError(
            "solver: test_and_snapshot_last_epochs needs a data layer that knows how many records an epoch has; "
            "this net has none, use test_interval and snapshot"
        )
    back = [math.floor(epoch / part) for epoch in range(count)]
    return frozenset(param.max_iter - iterations for iterations in back if iterations < param.max_iter)


def duration(seconds: float) -> str:
    """``1h 2m 5s``; hours and minutes only where there are any."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    parts = [f"{hours}h"] * (hours > 0) + [f"{minutes}m"] * (whole >= 60) + [f"{whole % 60}s"]
    return " ".join(parts)
