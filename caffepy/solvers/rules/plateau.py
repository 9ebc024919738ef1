"""The learning-rate policy "plateau": a step down whenever the loss has not fallen for some iterations.

Defined by the solver of Caffe's SSD branch; NVIDIA Caffe has its fields without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NO_LOSS = 1e38
"""The smallest loss before the first one, as in the schema."""


@dataclass
class Plateau:
    """What the policy remembers.

    Args:
        minimum_loss: the smallest loss so far, as averaged by `average_loss`.
        last_event: the iteration of that loss or of the last step.
    """

    minimum_loss: float = NO_LOSS
    last_event: int = 0

    def next_step(self, iteration: int, loss: float | None, step: int, windows: Sequence[int]) -> int:
        """The number of steps taken, of which each multiplies the rate by gamma.

        Args:
            iteration: updates made so far.
            loss: the last iteration's averaged loss over all devices; None before the first one.
            step: steps taken so far.
            windows: `plateau_winsize`: the iterations without a smaller loss that each step waits for.
        """
        if loss is not None and loss < self.minimum_loss:
            self.minimum_loss, self.last_event = loss, iteration
        if step < len(windows) and iteration >= self.last_event + windows[step]:
            self.last_event = iteration
            return step + 1
        return step
