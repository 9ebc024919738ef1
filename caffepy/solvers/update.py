"""The update of all parameters at once: gradient clipping, loss scale and the solver's rule over the flat buffers.

Owns what is the same for every rule. Everything stands on the device, the decision to skip a step included, so that an
iteration can be captured and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isfinite, sqrt

from caffepy.backend import Each, Expression, Scalar, expression
from caffepy.backend.arguments import Array
from caffepy.net import Net

FIRST_LOSS_SCALE = 4096.0
"""Where an adaptive loss scale begins if the net names none."""
GROWTH_INTERVAL = 1000.0
"""Good steps in a row after which an adaptive loss scale is doubled."""
LARGEST_LOSS_SCALE = 2.0**24


@expression
def square(x: Each) -> Each:
    return x * x


@expression
def control(
    total: Each, loss_scale: Each, good: Each, scale: Scalar, limit: Scalar, adaptive: Scalar
) -> tuple[Each, Each, Each, Each]:
    norm = sqrt(total) / loss_scale
    clipped = limit / norm if limit >= 0 and norm > limit else 1.0
    grown = min(loss_scale * 2, LARGEST_LOSS_SCALE) if good + 1 >= GROWTH_INTERVAL else loss_scale
    changed = grown if isfinite(total) else max(loss_scale * 0.5, 1.0)
    run = good + 1 if good + 1 < GROWTH_INTERVAL and isfinite(total) else 0.0
    return (
        scale * clipped / loss_scale,
        1.0 if isfinite(total) else 0.0,
        changed if adaptive > 0 else loss_scale,
        run,
    )


class Update:
    """A solver's update.

    Args:
        net: whose parameters.
        rule: the formula: (data, diff, histories..., lr_mult, decay_mult, scale, l2, l1, go, the rule's own numbers) to
            (data, histories...), both as they were where go is 0.
        history: the rule's memory.
        clip: L2 norm to which gradients are scaled down; negative: never.
        guard: whether to leave out steps with gradients that are not finite.
    """

    def __init__(self, net: Net, rule: Expression, history: list[Array], clip: float, guard: bool) -> None:
        self._net = net
        self._backend = net.backend
        self._rule = rule
        self._history = history
        self._clip = clip
        self._adaptive = net.param.global_grad_scale_adaptive
        scaled = self._adaptive or net.param.global_grad_scale != 1
        self._controls = clip >= 0 or guard or scaled
        self._lr_mult, self._decay_mult = net.parameters.multipliers()
        self._total, self._good, self._scale, self._go, self.loss_scale = (self._backend.zeros(()) for _ in range(5))
        self.restore_loss_scale(0.0)
        if scaled:
            net.context.loss_scale = self.loss_scale

    @property
    def adaptive(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self._adaptive

    def restore_loss_scale(self, value: float) -> None:
        """Set the loss scale, to the net's own where `value` is 0."""
        given = self._net.param.global_grad_scale
        start = FIRST_LOSS_SCALE if self._adaptive and given == 1 else given
        self._backend.fill(self.loss_scale, value or start)

    def run(self, scale: Array | float, l2: Array | float, l1: Array | float, numbers: Sequence[Array | float]) -> None:
        """Change the parameters, their copies in other storages and the history, by the gradients in `diff`."""
        parameters = self._net.parameters
        if not parameters.learned:
            return
        go: Array | float = 1.0
        if self._controls:
            scale, go = self._control(scale)
        arrays = [parameters.blocks(flat) for flat in (parameters.data, parameters.diff, *self._history)]
        copies = [parameters.blocks(flat) for flat in parameters.copies.values()]
        inputs = (*arrays, self._lr_mult, self._decay_mult, scale, l2, l1, go, *numbers)
        rule = self._rule.with_copies(len(copies))
        self._backend.apply(rule, inputs, (arrays[0], *arrays[2:], *copies), axis=0)

    def _control(self, scale: Array | float) -> tuple[Array, Array]:
        """What to multiply the gradients with, and whether to make the step."""
        gradients = self._net.parameters.gradients
        self._backend.reduce(square, (gradients,), (self._total,))
        state = (self._total, self.loss_scale, self._good)
        results = (self._scale, self._go, self.loss_scale, self._good)
        self._backend.apply(control, (*state, scale, self._clip, float(self._adaptive)), results)
        return self._scale, self._go

    def clipped(self) -> float | None:
        """The gradients' norm if the last step scaled them down, else None; waits for the device."""
        if self._clip < 0 or not self._controls:
            return None
        norm = math.sqrt(float(self._backend.to_host(self._total)))
        return norm if norm > self._clip else None
