"""Adam: rates from estimates of the gradient's first two moments."""

from __future__ import annotations

import math
from math import sqrt

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.errors import ConfigError
from caffepy.solvers.base import SOLVERS, Solver


@expression
def adam_update(
    data: Each, diff: Each, first: Each, second: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, beta1: Scalar, beta2: Scalar, delta: Scalar,
) -> tuple[Each, Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    m = beta1 * first + (1 - beta1) * gradient
    v = beta2 * second + (1 - beta2) * gradient * gradient
    change = rate * lr_mult * m / (sqrt(v) + delta)
    return data if found_inf > 0 else data - change, first if found_inf > 0 else m, second if found_inf > 0 else v


@SOLVERS.register("Adam")
class AdamSolver(Solver):
    """m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2;  w = w - rate * c * m / (sqrt(v) + delta).

    c = sqrt(1 - beta2^t) / (1 - beta1^t) for iteration t from 1; beta1 is `momentum`, beta2 `momentum2`. As in
    Caffe, delta is added to the uncorrected sqrt(v), and g holds the weight decay (no AdamW). Its history
    is m of all parameters, then v of all parameters.

    Defined by Caffe's `adam_solver.cpp`; Kingma and Ba, ICLR 2015.
    """

    histories = 2
    rule = adam_update
    least_delta = 1e-4

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        beta1, beta2, t = momentum, self.param.momentum2, self.iteration + 1
        if not 0 <= beta1 < 1:
            raise ConfigError(
                f'solver: momentum_policy "{self.param.momentum_policy}" makes the momentum of iteration '
                f"{self.iteration} {beta1:g}; with Adam it must be at least 0 and below 1, so lower max_momentum"
            )
        correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return rate * correction, beta1, beta2, self.delta
