"""What training on one device has and how far it is; the parts of a solver share it instead of the solver."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import StopRequestedError
from caffepy.net import Net
from caffepy.net.forward_runner import ForwardRunner
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers.callbacks import SolverCallback
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.requests import Requests
from caffepy.solvers.rules import policies
from caffepy.solvers.rules.plateau import Plateau
from caffepy.solvers.rules.update import Update
from caffepy.trace import Tracer

log = logging.getLogger(__name__)


class RootLog:
    """Logs lines that are alike on all devices: at info level on the root, at debug level on the others."""

    def __init__(self, is_root: bool) -> None:
        self._level = logging.INFO if is_root else logging.DEBUG

    def __call__(self, message: str, *arguments: object) -> None:
        log.log(self._level, message, *arguments, stacklevel=2)


@dataclass
class TrainState:
    """The state of training; `iteration`, `current_step` and `last_pass` change, the objects stay the same.

    Args:
        param: the solver's prototxt, with the random seed that is in use.
        backend: the device.
        shard: the device's rank among all that train together.
        resolve: finds the files that the solver names.
        callback: the other devices.
        trace: takes the times of what this device does.
        log: for lines that only the root shows.
        requests: stops and snapshots that were asked for.
        losses: of the last iterations.
        net: the train net.
        tests: run the test nets, in Caffe's order.
        history: the update rule's memory, each like `net.parameters.data`.
        update: changes the parameters.
        iteration: how many iterations were made.
        current_step: the number of steps that the learning rate's policy has taken.
        plateau: what the policy "plateau" remembers.
        last_pass: whether the present pass is the iteration's last, whose backward pass completes the gradients.
        scores: of snapshots in the tests that followed them, by iteration.
        score_name: what was scored, as `RetentionPolicy.keep_best` names it; empty: nothing.
    """

    param: SolverParameter
    backend: Backend
    shard: Shard
    resolve: PathResolver
    callback: SolverCallback
    trace: Tracer
    log: RootLog
    requests: Requests
    losses: LossWindow
    net: Net
    tests: list[ForwardRunner]
    history: list[Array]
    update: Update
    iteration: int = 0
    current_step: int = 0
    plateau: Plateau = field(default_factory=Plateau)
    last_pass: bool = True
    scores: dict[int, float] = field(default_factory=dict)
    score_name: str = ""

    @property
    def test_nets(self) -> list[Net]:
        """In Caffe's order."""
        return [runner.net for runner in self.tests]

    @contextmanager
    def unless_stopped(self) -> Iterator[None]:
        """An iteration, none if a stop is requested while it waits for its data, which it does before all else."""
        try:
            yield
        except StopRequestedError:
            self.log("Iteration %d waits for its data and is not made", self.iteration)

    def fetch(self, passes: range) -> None:
        """Have the data of some passes copied to the device.

        Raises:
            StopRequestedError: a stop is requested while a device that trains alone waits; nothing has changed.
        """
        for number in passes:
            self.net.prefetch_to_device(number)

    def learning_rate(self) -> float:
        """The rate of the next iteration, as far as it depends on the iterations made and not on the next loss."""
        return policies.learning_rate(self.param, self.iteration, self.current_step)[0]

    def passes(self) -> range:
        """The numbers of the present iteration's forward passes."""
        number = self.net.context.passes.number
        return range(number, number + self.param.iter_size)
