"""What an iteration asks of the device besides its forward and backward passes; eager and captured ones share it."""

from __future__ import annotations

from caffepy.solvers.hyperparameters import Hyperparameters
from caffepy.solvers.requests import FLAGS
from caffepy.solvers.train_state import TrainState


class IterationSteps:
    """The steps of an iteration that put work on the device's stream without waiting, so that they can be captured."""

    def __init__(self, state: TrainState, hyperparameters: Hyperparameters) -> None:
        self._state = state
        self._hyperparameters = hyperparameters

    def begin_pass(self, index: int) -> None:
        """Before each of an iteration's passes: where its random numbers begin, and that gradients start anew."""
        state, hyperparameters = self._state, self._hyperparameters
        state.net.context.passes.on_device = hyperparameters.counter(index)
        if index == 0:
            state.net.clear_param_diffs()
        state.last_pass = index == state.param.iter_size - 1
        if state.last_pass and state.callback.world_size > 1:
            state.backend.copy(hyperparameters.flags, state.net.parameters.flags[: len(FLAGS)])

    def exchange_gradients(self) -> None:
        """Average gradients and requests over all devices, so that all act in the same iteration."""
        with self._state.trace.span("exchange"):
            self._state.callback.on_gradients_ready()

    def update(self) -> None:
        """Change the parameters."""
        with self._state.trace.span("update"):
            self._state.update.run(*self._hyperparameters.factors())
