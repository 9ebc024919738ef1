"""The numbers that differ from iteration to iteration, as device scalars, so that captured work reads them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from caffepy.backend.types import Array, Counter
from caffepy.solvers.requests import FLAGS
from caffepy.solvers.rules import policies
from caffepy.solvers.train_state import TrainState

SCALE, L2, L1, RULE = range(len(FLAGS), len(FLAGS) + 4)
"""Indices of the device scalars behind the flags: factors of gradient and regularisation, then the rule's values."""


class Hyperparameters:
    """The device scalars of an iteration: requests, the update's factors, where each pass's random numbers begin.

    Args:
        state: of training.
        rule_values: the update rule's hyperparameters, by learning rate and momentum; as many in every iteration.
    """

    def __init__(self, state: TrainState, rule_values: Callable[[float, float], tuple[float, ...]]) -> None:
        self.rate = self.momentum = self.weight_decay = 0.0
        """Of the iteration for which `send` was called last."""
        self._state = state
        self._rule_values = rule_values
        count = RULE + len(rule_values(0.0, 0.5))
        self._scalars = state.backend.device_scalars(count, state.param.iter_size)

    def send(self) -> None:
        """Copy the numbers of the present iteration to the device."""
        state, param = self._state, self._state.param
        self.rate = self._next_rate()
        self.momentum = policies.momentum(param, state.iteration, self.rate)
        self.weight_decay = decay = policies.weight_decay(param, state.iteration, state.net.context.nvidia)
        l1 = param.regularization_type == "L1"
        scales = [1 / param.iter_size, 0.0 if l1 else decay, decay if l1 else 0.0]
        context = state.net.context
        counters = [(n, context.first_sample(n) if context.first_sample else 0) for n in state.passes()]
        values = [*state.requests.flags(), *scales, *self._rule_values(self.rate, self.momentum)]
        self._scalars.send(values, counters)

    def _next_rate(self) -> float:
        state = self._state
        if state.param.lr_policy == "plateau":
            self._step_on_plateau()
        rate, step = policies.learning_rate(state.param, state.iteration, state.current_step)
        if step != state.current_step and state.param.lr_policy == "multistep":
            state.log("MultiStep Status: Iteration %d, step = %d", state.iteration, step)
        state.current_step = step
        return rate

    def _step_on_plateau(self) -> None:
        state = self._state
        losses = state.losses.averaged(state.callback)
        loss = sum(losses) / len(losses) if losses else None
        windows = state.param.plateau_winsize
        step = state.plateau.next_step(state.iteration, loss, state.current_step, windows)
        if step != state.current_step:
            state.log("Plateau Status: Iteration %d, step = %d", state.iteration, step)
        state.current_step = step

    @property
    def flags(self) -> Array:
        """What `Requests.flags` gave, float32 (2,)."""
        return self._scalars.array[: len(FLAGS)]

    def counter(self, index: int) -> Counter | None:
        """Where the random numbers of one of the iteration's passes begin; None where the host counts passes."""
        return self._scalars.counters[index]

    def factors(self) -> tuple[Array | float, Array | float, Array | float, Sequence[Array | float]]:
        """What `Update.run` takes: the gradients' scale, L2 and L1 decay, and the rule's hyperparameters."""
        values = self._scalars.values
        return values[SCALE], values[L2], values[L1], values[RULE:]
