"""The numbers that are different in each iteration, where the work on the device finds them, captured or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from caffepy.backend.types import Array, Counter
from caffepy.solvers.rules import policies

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver

STOP, SNAPSHOT, SCALE, L2, L1, RULE = range(6)
"""Indices of the device scalars: the two requests, factors of gradient and regularisation, then the rule's own."""


class Hyperparameters:
    """What an iteration's work is told: requests, the update's factors, where each pass's random numbers begin.

    Args:
        solver: whose iterations.
    """

    def __init__(self, solver: Solver) -> None:
        self.rate = 0.0
        """The learning rate of the iteration for which `send` was called last."""
        self._solver = solver
        count = RULE + len(solver.hyperparameters(0.0, 0.5))
        self._mailbox = solver.backend.device_scalars(count, solver.param.iter_size)

    def send(self) -> None:
        """Put the numbers of the solver's present iteration where the device finds them."""
        solver, param = self._solver, self._solver.param
        self.rate = self._next_rate()
        momentum = policies.momentum(param, solver.iteration, self.rate)
        decay = policies.weight_decay(param, solver.iteration)
        l2 = param.regularization_type == "L2"
        scales = [1 / param.iter_size, decay if l2 else 0.0, 0.0 if l2 else decay]
        context = solver.net.context
        counters = [(n, context.first_sample(n) if context.first_sample else 0) for n in solver.passes()]
        values = [*solver.requests.flags(), *scales, *solver.hyperparameters(self.rate, momentum)]
        self._mailbox.send(values, counters)

    def _next_rate(self) -> float:
        solver = self._solver
        rate, step = policies.learning_rate(solver.param, solver.iteration, solver.current_step)
        if step != solver.current_step and solver.param.lr_policy == "multistep":
            solver.log("MultiStep Status: Iteration %d, step = %d", solver.iteration, step)
        solver.current_step = step
        return rate

    @property
    def flags(self) -> Array:
        """This device's requests, float32 (2,)."""
        return self._mailbox.array[STOP : SNAPSHOT + 1]

    def counter(self, index: int) -> Counter | None:
        """Where the random numbers of one of the iteration's passes begin; None where the host counts passes."""
        return self._mailbox.counters[index]

    def factors(self) -> tuple[Array | float, Array | float, Array | float, Sequence[Array | float]]:
        """What `Update.run` takes: the gradients' scale, L2 and L1 decay, and the rule's own numbers."""
        values = self._mailbox.values
        return values[SCALE], values[L2], values[L1], values[RULE:]
