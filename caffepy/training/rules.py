"""Caffe's update rules, and the update of all parameters at once within the steps that all rules share.

A rule has a formula and the numbers that it takes in an iteration. The formula computes new parameters and new history
of (data, gradient, history..., lr_mult, numbers...), all elements of the parameters at once. Its variable `change` is
what it subtracts from `data`. To add a rule, write its formula and a class that registers it under its type: nothing
else knows the rules. `docs/how-to/add-an-update-rule.md` is an example.

The steps of an update, in order: the gradients' norm, clipping and the loss scale make a factor of the gradients
(`GradientScaler`); weight decay is added (`regularised`); LARC gives each parameter a rate of its own (`Larc`); the
rule computes new parameters and history; an update whose gradients are not finite is skipped. Weight decay, rule and
skipping are one formula (`update_formula`), and so one kernel over the flat buffers.

All of it runs on the device, the decision to skip an update included, so that an iteration can be captured and
replayed.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property
from math import isfinite, sqrt
from typing import ClassVar

import numpy as np

from caffepy.backend import Channel, Each, Expression, Scalar, expression
from caffepy.backend.types import Array
from caffepy.errors import ConfigError, NonFiniteError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.net import Net
from caffepy.utils.registry import Registry

log = logging.getLogger(__name__)

TURBO_MOMENTUM = 0.95
"""Share of the old correlation of gradient and history in the new one."""
TURBO_FACTOR = 0.9
"""How much of the correlation `larc_turbo` takes off the rate."""


class UpdateRule(ABC):
    """A solver type's update.

    Args:
        param: the solver.
        nvidia: whether the net has NVIDIA's dialect.
    """

    formula: ClassVar[Expression]
    """(data, gradient, histories..., lr_mult, the rule's numbers...) to (data, histories...)."""
    decoupled_formula: ClassVar[Expression | None] = None
    """With weight decay beside the gradient (regularization_type "WD"): takes diff, decay_mult, scale and l2 in place
    of the gradient. None: the rule has no such form."""
    takes_momentum: ClassVar[bool] = True
    below_one: ClassVar[tuple[str, ...]] = ()
    """Fields of the solver that must be at least 0 and below 1."""
    least_delta: ClassVar[float] = 0.0
    """What `delta` is at least in NVIDIA's dialect."""

    def __init__(self, param: SolverParameter, nvidia: bool) -> None:
        self.param = param
        self.nvidia = nvidia

    @classmethod
    def histories(cls) -> int:
        """How many values of history the rule keeps for each element of the parameters."""
        return cls.formula.output_count - 1

    @property
    def delta(self) -> float:
        """The solver's `delta`, in NVIDIA's dialect with its lower limit."""
        return max(self.param.delta, self.least_delta) if self.nvidia else self.param.delta

    @property
    def in_use(self) -> Expression:
        """The formula that this solver's settings ask for."""
        decoupled = self.decoupled_formula if self.param.regularization_type == "WD" else None
        return decoupled or self.formula

    @abstractmethod
    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        """The formula's last arguments in an iteration; as many in each."""


RULES: Registry[type[UpdateRule]] = Registry("solver type")
"""By the solver's `type`."""


@expression
def sgd_update(
    data: Each, gradient: Each, history: Each, lr_mult: Channel, rate: Scalar, momentum: Scalar
) -> tuple[Each, Each]:
    change = rate * lr_mult * gradient + momentum * history
    return data - change, change


@expression
def sgd_decoupled_update(
    data: Each,
    diff: Each,
    history: Each,
    lr_mult: Channel,
    decay_mult: Channel,
    scale: Scalar,
    l2: Scalar,
    rate: Scalar,
    momentum: Scalar,
) -> tuple[Each, Each]:
    step = rate * lr_mult * scale * diff + momentum * history
    change = step + rate * lr_mult * decay_mult * l2 * data
    return data - change, step


@expression
def sgd_larc_rate(
    data2: Each,
    gradient2: Each,
    history2: Each,
    product: Each,
    correlation: Each,
    lr_mult: Each,
    rate: Scalar,
    momentum: Scalar,
    turbo: Scalar,
    eta: Scalar,
    clip: Scalar,
    found_inf: Scalar,
) -> tuple[Each, Each]:
    both = data2 > 0 and gradient2 > 0
    trust = (1 - momentum) * eta * sqrt(data2) / sqrt(gradient2) if both else 1.0
    cosine = product / (sqrt(gradient2) * sqrt(history2)) if gradient2 > 0 and history2 > 0 else 0.0
    mean = TURBO_MOMENTUM * correlation + (1 - TURBO_MOMENTUM) * cosine
    local = trust - TURBO_FACTOR * mean if turbo > 0 else trust
    wanted = local if lr_mult > 0 else lr_mult
    clipped = min(rate, wanted) / rate if rate > 0 else 0.0
    return clipped if clip > 0 else wanted, correlation if found_inf > 0 or turbo <= 0 else mean


@expression
def lars_rate(
    data2: Each,
    gradient2: Each,
    history2: Each,
    product: Each,
    correlation: Each,
    lr_mult: Each,
    rate: Scalar,
    momentum: Scalar,
    turbo: Scalar,
    ratio: Scalar,
    decay: Scalar,
    found_inf: Scalar,
) -> tuple[Each, Each]:
    length = sqrt(data2)
    both = data2 > 0 and gradient2 > 0
    local = ratio * length / (sqrt(gradient2) + decay * length) if both else 1.0
    return local if lr_mult > 0 else lr_mult, correlation


@RULES.register("SGD")
class SGD(UpdateRule):
    """h = momentum * h + rate * g;  w = w - h.

    g is the gradient, normalised and regularised: scale * diff + decay * w (L2) or decay * sign(w) (L1). The rate is
    inside the history, as in Caffe, so a change of rate does not act on steps already taken. With regularization_type
    "WD" g has no decay, and w is made smaller by rate * decay * w besides.

    Defined by Caffe's `sgd_solver.cpp` and NVIDIA's `sgd_solver.cu`; Bottou, "Stochastic Gradient Descent Tricks",
    2012.
    """

    formula = sgd_update
    decoupled_formula = sgd_decoupled_update
    larc_rate: ClassVar[Expression] = sgd_larc_rate
    """How LARC makes a parameter's rate of its norms, and the new correlation."""
    turbo_from: ClassVar[int] = 0
    """The first iteration in which `larc_turbo` acts."""

    @cached_property
    def as_nvidia_on_cpu(self) -> bool:
        """Whether the formulas of NVIDIA Caffe's CPU mode are wanted where they differ from those of its GPU mode."""
        return self.nvidia and self.param.solver_mode == SolverParameter.CPU

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum


@expression
def sag_update(
    data: Each, gradient: Each, history: Each, lr_mult: Channel, rate: Scalar, momentum: Scalar
) -> tuple[Each, Each]:
    mean = momentum * history + (1 - momentum) * gradient
    change = rate * lr_mult * mean
    return data - change, mean


@expression
def sag_decoupled_update(
    data: Each,
    diff: Each,
    history: Each,
    lr_mult: Channel,
    decay_mult: Channel,
    scale: Scalar,
    l2: Scalar,
    rate: Scalar,
    momentum: Scalar,
) -> tuple[Each, Each]:
    mean = momentum * history + (1 - momentum) * scale * diff
    change = rate * lr_mult * (mean + decay_mult * l2 * data)
    return data - change, mean


@expression
def sag_larc_rate(
    data2: Each,
    gradient2: Each,
    history2: Each,
    product: Each,
    correlation: Each,
    lr_mult: Each,
    rate: Scalar,
    momentum: Scalar,
    turbo: Scalar,
    eta: Scalar,
    clip: Scalar,
    found_inf: Scalar,
) -> tuple[Each, Each]:
    trust = eta * sqrt(data2) / sqrt(history2) if data2 > 0 and history2 > 0 else 1.0
    cosine = product / (sqrt(gradient2) * sqrt(history2)) if gradient2 > 0 and history2 > 0 else 0.0
    mean = TURBO_MOMENTUM * correlation + (1 - TURBO_MOMENTUM) * cosine
    boost = 1 - TURBO_FACTOR * mean if turbo > 0 else 1.0
    wanted = boost * (trust if lr_mult > 0 else lr_mult)
    clipped = min(rate, wanted) / rate if rate > 0 else 0.0
    return clipped if clip > 0 else wanted, correlation if found_inf > 0 or turbo <= 0 else mean


@RULES.register("SAG")
class SAG(SGD):
    """h = momentum * h + (1 - momentum) * g;  w = w - rate * h.

    g is as in `SGD`. LARC's rates come from the norm of h. With `solver_mode: CPU` the update is SGD's, which is what
    NVIDIA Caffe computes on a CPU.

    Defined by NVIDIA Caffe's `sag_solver.cpp` and `sag_solver.cu`.
    """

    formula = sag_update
    decoupled_formula = sag_decoupled_update
    larc_rate = sag_larc_rate
    turbo_from = 2

    @property
    def in_use(self) -> Expression:
        return sgd_update if self.as_nvidia_on_cpu else super().in_use


@expression
def nesterov_update(
    data: Each, gradient: Each, history: Each, lr_mult: Channel, rate: Scalar, momentum: Scalar
) -> tuple[Each, Each]:
    new = rate * lr_mult * gradient + momentum * history
    change = (1 + momentum) * new - momentum * history
    return data - change, new


@RULES.register("Nesterov")
class Nesterov(UpdateRule):
    """h' = momentum * h + rate * g;  w = w - ((1 + momentum) * h' - momentum * h).

    The gradient g is taken where the momentum leads; the parameters kept are those after that look ahead. g and its
    regularisation are as in `SGD`.

    Defined by Caffe's `nesterov_solver.cpp`; Nesterov, 1983; Sutskever et al., ICML 2013.
    """

    formula = nesterov_update

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum


@expression
def adagrad_update(
    data: Each, gradient: Each, history: Each, lr_mult: Channel, rate: Scalar, delta: Scalar
) -> tuple[Each, Each]:
    squares = history + gradient * gradient
    change = rate * lr_mult * gradient / (sqrt(squares) + delta)
    return data - change, squares


@RULES.register("AdaGrad")
class AdaGrad(UpdateRule):
    """h = h + g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGD`; there is no momentum.

    Defined by Caffe's `adagrad_solver.cpp`; Duchi, Hazan and Singer, JMLR 2011.
    """

    formula = adagrad_update
    takes_momentum = False
    least_delta = 1e-3

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, self.delta


@expression
def rmsprop_update(
    data: Each, gradient: Each, history: Each, lr_mult: Channel, rate: Scalar, decay: Scalar, delta: Scalar
) -> tuple[Each, Each]:
    mean = decay * history + (1 - decay) * gradient * gradient
    change = rate * lr_mult * gradient / (sqrt(mean) + delta)
    return data - change, mean


@RULES.register("RMSProp")
class RMSProp(UpdateRule):
    """h = rms_decay * h + (1 - rms_decay) * g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGD`; there is no momentum.

    Defined by Caffe's `rmsprop_solver.cpp`; Tieleman and Hinton, Coursera lecture 6.5, 2012.
    """

    formula = rmsprop_update
    takes_momentum = False
    below_one = ("rms_decay",)
    least_delta = 1e-4

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, self.param.rms_decay, self.delta


@expression
def adadelta_update(
    data: Each,
    gradient: Each,
    gradients: Each,
    steps: Each,
    lr_mult: Channel,
    rate: Scalar,
    decay: Scalar,
    delta: Scalar,
) -> tuple[Each, Each, Each]:
    mean = decay * gradients + (1 - decay) * gradient * gradient
    step = gradient * sqrt((steps + delta) / (mean + delta))
    change = rate * lr_mult * step
    return data - change, mean, decay * steps + (1 - decay) * step * step


@RULES.register("AdaDelta")
class AdaDelta(UpdateRule):
    """h = d h + (1 - d) g^2;  s = g sqrt((u + delta) / (h + delta));  u = d u + (1 - d) s^2;  w = w - rate s.

    d is `momentum`; g is as in `SGD`. Its history is h of all parameters, then u of all parameters.

    Defined by Caffe's `adadelta_solver.cpp`; Zeiler, arXiv:1212.5701, 2012.
    """

    formula = adadelta_update
    least_delta = 1e-3

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum, self.delta


@expression
def adam_update(
    data: Each,
    gradient: Each,
    first: Each,
    second: Each,
    lr_mult: Channel,
    rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    delta: Scalar,
) -> tuple[Each, Each, Each]:
    m = beta1 * first + (1 - beta1) * gradient
    v = beta2 * second + (1 - beta2) * gradient * gradient
    change = rate * lr_mult * m / (sqrt(v) + delta)
    return data - change, m, v


@RULES.register("Adam")
class Adam(UpdateRule):
    """m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2;  w = w - rate * c * m / (sqrt(v) + delta).

    c = sqrt(1 - beta2^t) / (1 - beta1^t) for iteration t from 1; beta1 is `momentum`, beta2 `momentum2`. As in
    Caffe, delta is added to the uncorrected sqrt(v), and g holds the weight decay (no AdamW). Its history
    is m of all parameters, then v of all parameters.

    Defined by Caffe's `adam_solver.cpp`; Kingma and Ba, ICLR 2015.
    """

    formula = adam_update
    below_one = ("momentum", "momentum2")
    least_delta = 1e-4

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        beta1, beta2, t = momentum, self.param.momentum2, iteration + 1
        if not 0 <= beta1 < 1:
            raise ConfigError(
                f'solver: momentum_policy "{self.param.momentum_policy}" makes the momentum of iteration '
                f"{iteration} {beta1:g}; with Adam it must be at least 0 and below 1, so lower max_momentum"
            )
        correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return rate * correction, beta1, beta2, self.delta


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


# -- weight decay and skipping -------------------------------------------------------------------------


@expression
def regularised(data: Each, diff: Each, decay_mult: Channel, scale: Scalar, l2: Scalar, l1: Scalar) -> Each:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    return scale * diff + decay_mult * (l2 * data + l1 * sign)


@cache
def update_formula(rule: Expression, store_change: bool) -> Expression:
    """A rule's formula with weight decay before it, which leaves all as it was where `found_inf` is set."""
    formula = rule.of("gradient", regularised) if "gradient" in rule.parameters else rule
    formula = formula.unless("found_inf", ("data", *_histories(rule)))
    return formula.returning("change", "diff if found_inf > 0 else change") if store_change else formula


def _histories(rule: Expression) -> list[str]:
    """The names of a rule's arguments that are history: those between the gradient and lr_mult."""
    return rule.parameters[2 : rule.parameters.index("lr_mult")]


def _numbers(rule: Expression) -> list[str]:
    """The names of a rule's arguments that are `UpdateRule.numbers`: those behind the arguments of all rules."""
    last = "l2" if "l2" in rule.parameters else "lr_mult"
    return rule.parameters[rule.parameters.index(last) + 1 :]


class Update:
    """Changes a net's parameters by their gradients.

    Args:
        net: holds the parameters.
        rule: of the solver, whose other steps its `param` asks for.
        history: the rule's memory, each like the flat parameters.
        guard: whether to skip updates with gradients that are not finite, also without clipping or a loss scale.
        max_skipped: updates skipped in a row after which `GradientScaler.check_skipped` raises.
    """

    def __init__(self, net: Net, rule: UpdateRule, history: list[Array], guard: bool, max_skipped: int) -> None:
        param = rule.param
        self.guard = GradientScaler(net, param.clip_gradients, guard, max_skipped)
        self.larc = _make_larc(net, rule, history[0])
        self._rule = rule
        self._net = net
        self._history = history
        # snapshot_diff: leave the step in `diff`, as Caffe does (sgd_solver.cpp, ComputeUpdateValue).
        self._store_change = param.snapshot_diff
        self._formula = update_formula(rule.in_use, self._store_change)
        self._lr_mult, self._decay_mult = net.parameters.multipliers()

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        """The values of `run`'s `numbers` in an iteration; as many in each."""
        further = () if self.larc is None else (self.larc.turbo(iteration),)
        return (*self._rule.numbers(iteration, rate, momentum), *further)

    def gradient_norm(self) -> float | None:
        """The L2 norm of the present gradients as `clip_gradients` takes it: of the sum over `iter_size` passes,
        without the loss scale. None if there are no gradients, or if `diff` has the step (snapshot_diff).

        Waits for the device.
        """
        if not self._net.parameters.learned or (self._store_change and not self.guard.acts):
            return None
        return self.guard.gradient_norm()

    def clear_changes(self) -> None:
        """Set to 0 what the last update left in `diff`, as Caffe does in each iteration (`net.cpp`, ClearParamDiffs).

        A backward pass overwrites only the gradients of the parameters that a loss reaches.
        """
        parameters = self._net.parameters
        if self._store_change and parameters.learned:
            self._net.backend.fill(parameters.gradients, 0.0)

    def run(self, scale: Array | float, l2: Array | float, l1: Array | float, numbers: Sequence[Array | float]) -> None:
        """Change the parameters, their copies in other dtypes and the history, by the gradients in `diff`.

        Args:
            scale: what to multiply the gradients with.
            l2, l1: weight decay.
            numbers: see `numbers`; on the host or on the device, as the others.
        """
        parameters, backend = self._net.parameters, self._net.backend
        if not parameters.learned:
            return
        scale, found_inf = self.guard.run(scale)
        lr_mult = self._lr_mult
        if self.larc is not None:
            lr_mult = self.larc.multipliers((scale, l2, l1), found_inf, numbers)
            numbers = numbers[:-1]
        rule = self._rule.in_use
        blocks = [parameters.blocks(flat) for flat in (parameters.data, parameters.diff, *self._history)]
        copies = [parameters.blocks(flat) for flat in parameters.copies.values()]
        arguments = {
            "data": blocks[0],
            "diff": blocks[1],
            "lr_mult": lr_mult,
            "decay_mult": self._decay_mult,
            "scale": scale,
            "l2": l2,
            "l1": l1,
            "found_inf": found_inf,
            **dict(zip(_histories(rule), blocks[2:], strict=True)),
            **dict(zip(_numbers(rule), numbers, strict=True)),
        }
        formula = self._formula.with_copies(len(copies))
        changed = (blocks[0], *blocks[2:], *([blocks[1]] if self._store_change else []))
        backend.apply(formula, [arguments[name] for name in formula.parameters], (*changed, *copies), axis=0)
        parameters.written()


# -- clipping, loss scale and the check for gradients that are not finite ------------------------------


@expression
def square(x: Each) -> tuple[Each, Each]:
    part = (x + OFFSET) * (1 / UNIT)
    return x * x, part * part


@expression
def control(
    small_squares: Each,
    large_squares: Each,
    loss_scale: Each,
    good: Each,
    skipped: Each,
    bad: Each,
    scale: Scalar,
    limit: Scalar,
    adaptive: Scalar,
    most: Scalar,
) -> tuple[Each, Each, Each, Each, Each, Each, Each]:
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


class GradientScaler:
    """Clips gradients, divides them by the loss scale, and finds gradients that are not finite.

    Args:
        net: holds the gradients.
        clip: L2 norm to which gradients are scaled down; negative: never.
        wanted: find gradients that are not finite also without clipping or a loss scale.
        max_skipped: updates skipped in a row after which `check_skipped` raises.
    """

    def __init__(self, net: Net, clip: float, wanted: bool, max_skipped: int) -> None:
        self._net = net
        self._backend = net.backend
        self._clip = clip
        self.adaptive = net.param.global_grad_scale_adaptive
        """Whether the loss scale follows the gradients."""
        scaled = self.adaptive or net.param.global_grad_scale != 1
        self.acts = clip >= 0 or wanted or scaled
        """Whether `run` takes the gradients' norm in each iteration."""
        self._max_skipped = max_skipped
        self._shown = 0
        self._squares = [self._backend.zeros(()) for _ in range(2)]
        """The sums that `square` makes of the gradients. Both are not finite where a gradient is not."""
        self._good, self._scale, self._found_inf = (self._backend.zeros(()) for _ in range(3))
        self.loss_scale, self._norm, self._skipped, self._bad = (self._backend.zeros(()) for _ in range(4))
        self.restore_loss_scale(0.0, 0)
        if scaled:
            net.context.loss_scale = self.loss_scale

    def run(self, scale: Array | float) -> tuple[Array | float, Array | float]:
        """What to multiply the gradients with, `scale` included, and whether to skip the update (1) or not (0)."""
        if not self.acts:
            return scale, 0.0
        self._backend.reduce(square, (self._net.parameters.gradients,), self._squares)
        state = (self.loss_scale, self._good, self._skipped, self._bad)
        settings = (scale, self._clip, float(self.adaptive), float(self._max_skipped))
        outputs = (self._scale, self._found_inf, self._norm, *state)
        self._backend.apply(control, (*self._squares, *state, *settings), outputs)
        return self._scale, self._found_inf

    @property
    def good_steps(self) -> int:
        """Good steps since the adaptive loss scale was changed; waits for the device."""
        return int(self._backend.to_host(self._good))

    def restore_loss_scale(self, value: float, good_steps: int) -> None:
        """Set what an adaptive loss scale was in a snapshot; the net's own where `value` is 0 or it is not adaptive."""
        given = self._net.param.global_grad_scale
        start = FIRST_LOSS_SCALE if self.adaptive and given == 1 else given
        self._backend.fill(self.loss_scale, value if value and self.adaptive else start)
        self._backend.fill(self._good, good_steps if self.adaptive else 0)

    def clipped(self) -> float | None:
        """The gradients' norm, without the loss scale, if the last update scaled them down, else None.

        Waits for the device.
        """
        if self._clip < 0:
            return None
        norm = float(self._backend.to_host(self._norm))
        return norm if self._clip < norm < math.inf else None

    def gradient_norm(self) -> float:
        """The gradients' norm, without the loss scale; computed here unless `run` does. Waits for the device."""
        if self.acts:
            return float(self._backend.to_host(self._norm))
        self._backend.reduce(square, (self._net.parameters.gradients,), self._squares)
        small, large = (math.sqrt(float(self._backend.to_host(squares))) for squares in self._squares)
        return small if isfinite(small) else large * UNIT

    def newly_skipped(self) -> int:
        """Updates skipped since the last call; waits for the device."""
        skipped = int(self._backend.to_host(self._skipped)) if self.acts else 0
        new, self._shown = skipped - self._shown, skipped
        return new

    def check_skipped(self, iteration: int) -> None:
        """Raise where too many updates in a row were skipped; waits for the device.

        Raises:
            NonFiniteError: in this iteration, naming the layer whose gradient overflowed.
        """
        if not self.acts or float(self._backend.to_host(self._bad)) < self._max_skipped:
            return
        raise NonFiniteError(
            f"{self._max_skipped} updates in a row were skipped, because {self._where_overflow()}; {self._advice()}",
            iteration,
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
        if self._net.param.global_grad_scale != 1 and not self.adaptive:
            return "lower global_grad_scale or set global_grad_scale_adaptive: true"
        half = "float16" in self._net.parameters.copies
        way = "keep the layer in FLOAT or BFLOAT16" if half else "use --compression bf16 where they are compressed"
        return f"lower base_lr, {way}, or allow more with --max-skipped"


# -- layer-wise adaptive rates -------------------------------------------------------------------------


@expression
def norm_terms(data: Each, gradient: Each, history: Each, decay_mult: Scalar) -> tuple[Each, Each, Each, Each]:
    return data * data, gradient * gradient, history * history, gradient * history


regularised_norm_terms = norm_terms.of("gradient", regularised)
"""Of one parameter, whose decay_mult is a number."""


@expression
def spread(rate: Scalar) -> Each:
    return rate


def _make_larc(net: Net, rule: UpdateRule, history: Array) -> Larc | None:
    """LARC or LARS, if the solver asks for it and its rule has it."""
    if not (rule.param.larc or rule.param.local_lr_auto):
        return None
    if isinstance(rule, SGD):
        return Larc(net, rule, history)
    if rule.param.larc:
        log.warning("larc has no effect on a solver of type %s, as in NVIDIA Caffe", rule.param.type)
    else:
        log.warning("local_lr_auto has no effect on a solver of type %s; use SGD", rule.param.type)
    return None


class Larc:
    """Layer-wise adaptive rate control: a rate for each parameter, from the norms of its values and its gradient.

    The rates take the place of lr_mult in SGD and SAG solvers with `larc: true`. Defined by NVIDIA Caffe's
    `sgd_solver.cpp` and `sag_solver.cpp` (GetLocalRate); You, Gitman and Ginsburg, arXiv:1708.03888, 2017. With
    `local_lr_auto` the rates are those of Intel Caffe's `sgd_solver.cpp`.

    Args:
        net: holds the parameters.
        rule: gives the formula of the rate.
        history: the update rule's memory.
    """

    def __init__(self, net: Net, rule: SGD, history: Array) -> None:
        self._net = net
        self._backend = net.backend
        self._rule = rule
        self._history = history
        param: SolverParameter = rule.param
        self._turbo = param.larc_turbo
        self._formula = lars_rate if param.local_lr_auto else rule.larc_rate
        self._settings = (param.larc_eta, float(param.larc_policy == "clip"))
        if param.local_lr_auto:
            self._settings = (param.local_gw_ratio, param.weight_decay)
        self._learned = [parameter for parameter in net.parameters.parameters if parameter.lr_mult != 0]
        count = len(self._learned)
        self._terms = [self._backend.zeros((count,)) for _ in range(4)]
        self._lr_mult, self._rates = self._backend.zeros((count,)), self._backend.zeros((count,))
        lr_mult = [parameter.lr_mult for parameter in self._learned]
        self._backend.from_host(np.array(lr_mult, np.float32), self._lr_mult)
        self.correlation = self._backend.zeros((count,))
        """Moving average of each learned parameter's cosine between gradient and history, for `larc_turbo`."""
        self._multipliers = net.parameters.multipliers()[0]

    def turbo(self, iteration: int) -> float:
        """Whether `larc_turbo` acts (1) or not (0)."""
        return float(self._turbo and iteration >= self._rule.turbo_from)

    def restore(self, correlation: Sequence[float]) -> None:
        """Take over the correlations of a snapshot; where it has none, as one of NVIDIA Caffe's, they begin at 0."""
        values = np.array(correlation, np.float32)
        fits = values.shape == tuple(self.correlation.shape)
        self._backend.from_host(values if fits else np.zeros(self.correlation.shape, np.float32), self.correlation)

    def multipliers(
        self, scales: Sequence[Array | float], found_inf: Array | float, values: Sequence[Array | float]
    ) -> Array:
        """What takes the place of lr_mult, for each block of the flat buffers.

        Args:
            scales: factors of the gradient, of L2 and of L1 decay.
            found_inf: not 0 where the gradients are not finite.
            values: learning rate, momentum, and `turbo`.
        """
        backend, buffers = self._backend, self._net.parameters
        # The gradient's norm includes weight decay in NVIDIA Caffe's CPU mode.
        scale, l2, l1 = scales if self._rule.as_nvidia_on_cpu else (scales[0], 0.0, 0.0)
        flats = (buffers.data, buffers.diff, self._history)
        for index, parameter in enumerate(self._learned):
            data, diff, history = (flat[parameter.start : parameter.stop] for flat in flats)
            sums = [term[index : index + 1].reshape(()) for term in self._terms]
            arguments = {
                "data": data,
                "diff": diff,
                "history": history,
                "decay_mult": parameter.decay_mult,
                "scale": scale,
                "l2": l2,
                "l1": l1,
            }
            inputs = [arguments[name] for name in regularised_norm_terms.parameters]
            backend.reduce(regularised_norm_terms, inputs, sums)
        inputs = [*self._terms, self.correlation, self._lr_mult, *values, *self._settings, found_inf]
        backend.apply(self._formula, inputs, (self._rates, self.correlation))
        for index, parameter in enumerate(self._learned):
            blocks = self._multipliers[buffers.block_range(parameter)]
            backend.apply(spread, (self._rates[index : index + 1].reshape(()),), (blocks,))
        return self._multipliers
