"""Caffe's update rules: for each solver type a formula and the numbers that it takes in an iteration.

A formula computes new parameters and new history of (data, gradient, history..., lr_mult, numbers...), all elements of
the parameters at once. `update.py` puts gradient clipping, weight decay, LARC and the check for gradients that are not
finite around it. Its variable `change` is what it subtracts from `data`.

To add a rule, write its formula and a class that registers it under its type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from math import sqrt
from typing import ClassVar

from caffepy.backend import Channel, Each, Expression, Scalar, expression
from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.utils.registry import Registry

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
        return self.formula

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
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    step = rate * lr_mult * scale * diff + momentum * history
    change = step + rate * lr_mult * decay_mult * l2 * data
    return data - change, step


@expression
def sgd_larc_rate(
    data2: Each, gradient2: Each, history2: Each, product: Each, correlation: Each, lr_mult: Each,
    rate: Scalar, momentum: Scalar, turbo: Scalar, eta: Scalar, clip: Scalar, found_inf: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
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
    data2: Each, gradient2: Each, history2: Each, product: Each, correlation: Each, lr_mult: Each,
    rate: Scalar, momentum: Scalar, turbo: Scalar, ratio: Scalar, decay: Scalar, found_inf: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
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
    decoupled_formula: ClassVar[Expression] = sgd_decoupled_update
    """With weight decay beside the gradient: takes diff, decay_mult, scale and l2 in place of the gradient."""
    larc_rate: ClassVar[Expression] = sgd_larc_rate
    """How LARC makes a parameter's rate of its norms, and the new correlation."""
    turbo_from: ClassVar[int] = 0
    """The first iteration in which `larc_turbo` acts."""

    @cached_property
    def as_nvidia_on_cpu(self) -> bool:
        """Whether the formulas of NVIDIA Caffe's CPU mode are wanted where they differ from those of its GPU mode."""
        return self.nvidia and self.param.solver_mode == SolverParameter.CPU

    @property
    def in_use(self) -> Expression:
        return self.decoupled_formula if self.param.regularization_type == "WD" else self.formula

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
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    mean = momentum * history + (1 - momentum) * scale * diff
    change = rate * lr_mult * (mean + decay_mult * l2 * data)
    return data - change, mean


@expression
def sag_larc_rate(
    data2: Each, gradient2: Each, history2: Each, product: Each, correlation: Each, lr_mult: Each,
    rate: Scalar, momentum: Scalar, turbo: Scalar, eta: Scalar, clip: Scalar, found_inf: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
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
    least_delta = 1e-4

    def numbers(self, iteration: int, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, self.param.rms_decay, self.delta


@expression
def adadelta_update(
    data: Each, gradient: Each, gradients: Each, steps: Each, lr_mult: Channel,
    rate: Scalar, decay: Scalar, delta: Scalar,
) -> tuple[Each, Each, Each]:  # fmt: skip
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
    data: Each, gradient: Each, first: Each, second: Each, lr_mult: Channel,
    rate: Scalar, beta1: Scalar, beta2: Scalar, delta: Scalar,
) -> tuple[Each, Each, Each]:  # fmt: skip
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
