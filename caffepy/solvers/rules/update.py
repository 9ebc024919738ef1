"""The update of all parameters at once: gradient clipping, loss scale and the solver's rule over the flat buffers.

All of it runs on the device, the decision to skip an update included, so that an iteration can be captured and
replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isfinite, sqrt

from caffepy.backend import Each, Expression, Scalar, expression
from caffepy.backend.types import Array
from caffepy.errors import NonFiniteError
from caffepy.net import Net
from caffepy.solvers.rules.larc import Larc

FIRST_LOSS_SCALE = 4096.0
"""Where an adaptive loss scale begins if the net names none."""
GROWTH_INTERVAL = 1000.0
"""Good steps in a row after which an adaptive loss scale is doubled."""
LARGEST_LOSS_SCALE = 2.0**24
UNIT = 2.0**80
"""What values are divided by in the second sum of squares: 2^31 of the largest float32 have a finite sum there."""
OFFSET = 2.0**20
"""Added to values before that, so that no square is subnormal, which would be slow. Norms that need the second sum are
above 2^64: what it adds to them is below float32's precision."""


@expression
def square(x: Each) -> tuple[Each, Each]:
    part = (x + OFFSET) * (1 / UNIT)
    return x * x, part * part


@expression
def control(
    small_squares: Each, large_squares: Each, loss_scale: Each, good: Each, skipped: Each, bad: Each,
    scale: Scalar, limit: Scalar, adaptive: Scalar, most: Scalar,
) -> tuple[Each, Each, Each, Each, Each, Each, Each]:  # fmt: skip
    squares = small_squares if isfinite(small_squares) else large_squares
    unit = 1.0 if isfinite(small_squares) else UNIT
    root = sqrt(squares) / loss_scale
    norm = root * unit
    clipped = limit / root / unit if limit >= 0 and norm > limit else 1.0
    grown = min(loss_scale * 2, LARGEST_LOSS_SCALE) if good + 1 >= GROWTH_INTERVAL else loss_scale
    changed = grown if isfinite(squares) else max(loss_scale * 0.5, 1.0)
    run = good + 1 if good + 1 < GROWTH_INTERVAL and isfinite(squares) else 0.0
    row = 0.0 if isfinite(squares) else bad + 1
    return (
        scale * clipped / loss_scale,
        0.0 if isfinite(squares) else 1.0,
        norm,
        changed if adaptive > 0 else loss_scale,
        run,
        skipped if isfinite(squares) else skipped + 1,
        bad if bad >= most else row,
    )


class Update:
    """Changes a net's parameters by their gradients.

    Args:
        net: holds the parameters.
        rule: the formula: (data, diff, histories..., lr_mult, decay_mult, scale, l2, l1, found_inf, the rule's
            hyperparameters) to (data, histories...), both as they were where found_inf is not 0. Its variable `change`
            is what it subtracts from data.
        history: the rule's memory.
        clip: L2 norm to which gradients are scaled down; negative: never.
        guard: whether to skip updates with gradients that are not finite, also without clipping or a loss scale.
        max_skipped: updates skipped in a row after which `check_skipped` raises.
        larc: gives a rate to each parameter; None: lr_mult holds.
        store_change: leave the step that is subtracted from the parameters in `diff`, as Caffe does (`sgd_solver.cpp`,
            ComputeUpdateValue), in place of the gradients; these stay where the update is skipped.
    """

    def __init__(
        self,
        net: Net,
        rule: Expression,
        history: list[Array],
        clip: float,
        guard: bool,
        max_skipped: int,
        larc: Larc | None = None,
        store_change: bool = False,
    ) -> None:
        self.larc = larc
        self._net = net
        self._backend = net.backend
        self._rule = rule.returning("change", "diff if found_inf > 0 else change") if store_change else rule
        self._store_change = store_change
        self._history = history
        self._clip = clip
        self._adaptive = net.param.global_grad_scale_adaptive
        scaled = self._adaptive or net.param.global_grad_scale != 1
        self._controls = clip >= 0 or guard or scaled
        self._max_skipped = max_skipped
        self._shown = 0
        self._lr_mult, self._decay_mult = net.parameters.multipliers()
        self._squares = [self._backend.zeros(()) for _ in range(2)]
        """The sums that `square` makes of the gradients. Both are not finite where a gradient is not."""
        self._good, self._scale, self._found_inf = (self._backend.zeros(()) for _ in range(3))
        self.loss_scale, self._norm, self._skipped, self._bad = (self._backend.zeros(()) for _ in range(4))
        self.restore_loss_scale(0.0, 0)
        if scaled:
            net.context.loss_scale = self.loss_scale

    @property
    def adaptive(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self._adaptive

    @property
    def good_steps(self) -> int:
        """Good steps since the adaptive loss scale was changed; waits for the device."""
        return int(self._backend.to_host(self._good))

    def restore_loss_scale(self, value: float, good_steps: int) -> None:
        """Set what an adaptive loss scale was in a snapshot; the net's own where `value` is 0 or it is not adaptive."""
        given = self._net.param.global_grad_scale
        start = FIRST_LOSS_SCALE if self._adaptive and given == 1 else given
        self._backend.fill(self.loss_scale, value if value and self._adaptive else start)
        self._backend.fill(self._good, good_steps if self._adaptive else 0)

    def run(
        self, scale: Array | float, l2: Array | float, l1: Array | float, hyperparameters: Sequence[Array | float]
    ) -> None:
        """Change the parameters, their copies in other dtypes and the history, by the gradients in `diff`."""
        parameters = self._net.parameters
        if not parameters.learned:
            return
        found_inf: Array | float = 0.0
        if self._controls:
            scale, found_inf = self._control(scale)
        lr_mult = self._lr_mult
        if self.larc is not None:
            lr_mult = self.larc.multipliers((scale, l2, l1), found_inf, hyperparameters)
            hyperparameters = hyperparameters[:2]  # the rules that LARC serves take rate and momentum
        arrays = [parameters.blocks(flat) for flat in (parameters.data, parameters.diff, *self._history)]
        copies = [parameters.blocks(flat) for flat in parameters.copies.values()]
        inputs = (*arrays, lr_mult, self._decay_mult, scale, l2, l1, found_inf, *hyperparameters)
        changed = (arrays[0], *arrays[2:], *([arrays[1]] if self._store_change else []))
        self._backend.apply(self._rule.with_copies(len(copies)), inputs, (*changed, *copies), axis=0)
        parameters.written()

    def _control(self, scale: Array | float) -> tuple[Array, Array]:
        """What to multiply the gradients with, and whether to skip the update (1) or not (0); both on the device."""
        gradients = self._net.parameters.gradients
        self._backend.reduce(square, (gradients,), self._squares)
        state = (self.loss_scale, self._good, self._skipped, self._bad)
        settings = (scale, self._clip, float(self._adaptive), float(self._max_skipped))
        outputs = (self._scale, self._found_inf, self._norm, *state)
        self._backend.apply(control, (*self._squares, *state, *settings), outputs)
        return self._scale, self._found_inf

    def clipped(self) -> float | None:
        """The gradients' norm, without the loss scale, if the last update scaled them down, else None.

        Waits for the device.
        """
        if self._clip < 0:
            return None
        norm = float(self._backend.to_host(self._norm))
        return norm if self._clip < norm < math.inf else None

    def newly_skipped(self) -> int:
        """Updates skipped since the last call; waits for the device."""
        skipped = int(self._backend.to_host(self._skipped)) if self._controls else 0
        new, self._shown = skipped - self._shown, skipped
        return new

    def check_skipped(self) -> None:
        """Raise where too many updates in a row were skipped; waits for the device.

        Raises:
            NonFiniteError: naming the layer whose gradient overflowed.
        """
        if not self._controls or float(self._backend.to_host(self._bad)) < self._max_skipped:
            return
        raise NonFiniteError(
            f"{self._max_skipped} updates in a row were skipped, because {self._where_overflow()}; {self._advice()}"
        )

    def _where_overflow(self) -> str:
        """What of the present gradients is not finite; `diff` has them in the order of the backward pass."""
        parameters, backend = self._net.parameters, self._backend
        learned = sorted((p for p in parameters.parameters if p.lr_mult != 0), key=lambda parameter: parameter.start)
        broken = (p.layer for p in learned if not backend.all_finite(parameters.diff[p.start : p.stop]))
        layer = next(broken, None)
        if layer is None:
            return "gradients were not finite; now they are again, so that the layer is not known"
        return f"gradients are not finite; in the backward pass that begins in layer '{layer.name}' ({layer.type})"

    def _advice(self) -> str:
        if self._net.param.global_grad_scale != 1 and not self._adaptive:
            return "lower global_grad_scale or set global_grad_scale_adaptive: true"
        half = "float16" in self._net.parameters.copies
        way = "keep the layer in FLOAT or BFLOAT16" if half else "use --compression bf16 where they are compressed"
        return f"lower base_lr, {way}, or allow more with --max-skipped"
