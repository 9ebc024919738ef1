"""The average of running statistics over all devices, so that what is tested and saved is one model."""

from __future__ import annotations

from caffepy.solvers.train_state import TrainState


class StatisticsAverage:
    """Averages at most once an iteration: averaging equal numbers could round them, and a resumed run starts from them.

    Args:
        state: of training.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._averaged_at = 0

    def begin(self) -> None:
        """Training starts: the root has given all devices its statistics."""
        self._averaged_at = self._state.iteration

    def take(self) -> None:
        """Average them, unless they are the average already. Every device must call it."""
        state = self._state
        if state.callback.world_size == 1 or self._averaged_at == state.iteration:
            return
        self._averaged_at = state.iteration
        if arrays := state.net.statistics(local_only=True):
            state.callback.average_over_devices(arrays)
