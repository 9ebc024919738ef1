"""What falls due in which iteration: displays, reads of the loss, tests and snapshots (Caffe's `Solver::Step`)."""

from __future__ import annotations

import math

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.net import Net

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""


class Schedule:
    """Answers for an iteration, by the number of iterations before it; the solver's fields may change meanwhile.

    Args:
        param: the solver.
        net: the train net.

    Raises:
        ConfigError: `test_and_snapshot_last_epochs` is set, and no layer knows how many records an epoch has.
    """

    def __init__(self, param: SolverParameter, net: Net) -> None:
        self._param = param
        self._net = net
        self._last_epoch_ends()  # raises before training

    def display_is_due(self, iteration: int) -> bool:
        """Whether an iteration is shown."""
        return _divides(self._param.display, iteration)

    def loss_is_due(self, iteration: int) -> bool:
        """Whether the loss is read though it is not shown: always where reading it does not wait for the device."""
        follows_loss = self._param.average_loss > 1 or self._param.lr_policy == "plateau"
        return not self._net.backend.asynchronous or follows_loss or _divides(CHECK_INTERVAL, iteration)

    def test_is_due(self, iteration: int) -> bool:
        """Whether the test nets are scored before an iteration; `test_initialization` decides on the first one."""
        due = _divides(self._param.test_interval, iteration - self._param.test_offset)
        return due or iteration in self._last_epoch_ends()

    def snapshot_is_due(self, iteration: int) -> bool:
        """Whether a snapshot is written before an iteration; `snapshot_after_train` decides on the last one."""
        return _divides(self._param.snapshot, iteration) or iteration in self._last_epoch_ends()

    def _last_epoch_ends(self) -> frozenset[int]:
        """The iterations after which `test_and_snapshot_last_epochs` asks for a test and a snapshot."""
        # Epochs are counted back from max_iter, which ends the last one (NVIDIA Caffe's `Solver::Step`); anew in each
        # iteration, as the solver may join others.
        count, last = self._param.test_and_snapshot_last_epochs, self._param.max_iter
        if count <= 0:
            return frozenset()
        part = self.epochs_per_iteration
        if part is None:
            raise ConfigError(
                "solver: test_and_snapshot_last_epochs needs a data layer that knows how many records an epoch has; "
                "this net has none, use test_interval and snapshot"
            )
        back = [math.floor(epoch / part) for epoch in range(count)]
        return frozenset(last - iterations for iterations in back if iterations < last)

    @property
    def epochs_per_iteration(self) -> float | None:
        """By the net's first layer that knows how many records an epoch has; None if there is none."""
        sizes = [size for layer in self._net.layers if (size := layer.epoch_size()) is not None]
        return self.global_batch * self._param.iter_size / sizes[0] if sizes else None

    @property
    def global_batch(self) -> int:
        """Samples of all devices in a pass."""
        return self._net.batch_size() * self._net.context.shard.parts


def _divides(interval: int, iteration: int) -> bool:
    return interval > 0 and iteration % interval == 0
