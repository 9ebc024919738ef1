"""The numbers that differ from iteration to iteration, as device scalars, so that captured work reads them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from caffepy.backend.types import Array, Counter
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers import policies
from caffepy.solvers.display import RootLog
from caffepy.solvers.policies import Plateau, StepEarly
from caffepy.solvers.requests import FLAGS, Requests

SCALE, L2, L1, RULE = range(len(FLAGS), len(FLAGS) + 4)
"""Indices of the device scalars behind the flags: factors of gradient and regularisation, then the rule's numbers."""


class Hyperparameters:
    """The device scalars of an iteration: requests, the update's factors, where each pass's random numbers begin.

    Args:
        param: the solver.
        net: the train net.
        requests: of this device, which travel with the gradients.
        numbers: the update's, by iteration, learning rate and momentum; as many in every iteration.
        log: for the steps of the learning rate.
    """

    def __init__(
        self,
        param: SolverParameter,
        net: Net,
        requests: Requests,
        numbers: Callable[[int, float, float], tuple[float, ...]],
        log: RootLog,
    ) -> None:
        self.rate = self.momentum = self.weight_decay = 0.0
        """Of the iteration for which `send` was called last."""
        self.current_step = 0
        """The number of steps that the learning rate's policy has taken."""
        self.plateau = Plateau()
        """What the policy "plateau" remembers."""
        self.step_early = StepEarly()
        """What the policy "stepearly" remembers."""
        self._param = param
        self._net = net
        self._requests = requests
        self._numbers = numbers
        self._log = log
        count = RULE + len(numbers(0, 0.0, 0.5))
        self._scalars = net.backend.device_scalars(count, param.iter_size)

    def learning_rate(self, iteration: int) -> float:
        """The rate of an iteration, as far as it does not depend on the next loss."""
        return policies.learning_rate(self._param, iteration, self.current_step)[0]

    def send(self, iteration: int, passes: range, loss: float | None) -> None:
        """Copy the numbers of an iteration to the device.

        Args:
            iteration: how many were made before.
            passes: the numbers of its forward passes.
            loss: of the last iterations and all devices, for the policy "plateau"; None: there was none.
        """
        param, context = self._param, self._net.context
        self.rate = self._next_rate(iteration, loss)
        self.momentum = policies.momentum(param, iteration, self.rate)
        self.weight_decay = decay = policies.weight_decay(param, iteration, context.nvidia)
        l1 = param.regularization_type == "L1"
        scales = [1 / param.iter_size, 0.0 if l1 else decay, decay if l1 else 0.0]
        counters = [(n, context.first_sample(n) if context.first_sample else 0) for n in passes]
        values = [*self._requests.flags(), *scales, *self._numbers(iteration, self.rate, self.momentum)]
        self._scalars.send(values, counters)

    def note_score(self, iteration: int, score: float) -> None:
        """Take a test's first score, for the policy "stepearly"; the same on every device."""
        step = self.step_early.next_step(score, self.current_step, self._param.stepearly)
        if step != self.current_step:
            self._log("StepEarly Status: Iteration %d, step = %d", iteration, step)
        self.current_step = step

    def _next_rate(self, iteration: int, loss: float | None) -> float:
        if self._param.lr_policy == "plateau":
            step = self.plateau.next_step(iteration, loss, self.current_step, self._param.plateau_winsize)
            if step != self.current_step:
                self._log("Plateau Status: Iteration %d, step = %d", iteration, step)
            self.current_step = step
        rate, step = policies.learning_rate(self._param, iteration, self.current_step)
        if step != self.current_step and self._param.lr_policy == "multistep":
            self._log("MultiStep Status: Iteration %d, step = %d", iteration, step)
        self.current_step = step
        return rate

    @property
    def flags(self) -> Array:
        """What `Requests.flags` gave, float32 (2,)."""
        return self._scalars.array[: len(FLAGS)]

    def counter(self, index: int) -> Counter | None:
        """Where the random numbers of one of the iteration's passes begin; None where the host counts passes."""
        return self._scalars.counters[index]

    def factors(self) -> tuple[Array | float, Array | float, Array | float, Sequence[Array | float]]:
        """What `Update.run` takes: the gradients' scale, L2 and L1 decay, and the rule's numbers."""
        values = self._scalars.values
        return values[SCALE], values[L2], values[L1], values[RULE:]
