"""Adam: rates from estimates of the gradient's first two moments."""

from __future__ import annotations

import math
from math import sqrt

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def adam_update(
    data: Each,
    diff: Each,
    first: Each,
    second: Each,
    scale: Scalar,
    l2: Scalar,
    l1: Scalar,
    rate: Scalar,
    beta1: Scalar,
    beta2: Scalar,
    delta: Scalar,
) -> tuple[Each, Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + l2 * data + l1 * sign
    m = beta1 * first + (1 - beta1) * gradient
    v = beta2 * second + (1 - beta2) * gradient * gradient
    return data - rate * m / (sqrt(v) + delta), m, v


@SOLVERS.register("Adam")
class AdamSolver(Solver):
    """m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2;  w = w - rate * c * m / (sqrt(v) + delta).

    c = sqrt(1 - beta2^t) / (1 - beta1^t) for iteration t from 1; beta1 is `momentum`, beta2 `momentum2`. As in
    Caffe, delta is added to the uncorrected sqrt(v), and g holds the weight decay (no AdamW). Its history
    is m of all parameters, then v of all parameters.

    Defined by Caffe's `adam_solver.cpp`; Kingma and Ba, ICLR 2015.
    """

    histories = 2

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        beta1, beta2, t = step.momentum, self.param.momentum2, self.iteration + 1
        correction = math.sqrt(1 - beta2**t) / (1 - beta1**t)
        scalars = (step.scale, step.l2, step.l1, step.rate * correction, beta1, beta2, self.param.delta)
        self.backend.apply(adam_update, (data, diff, *history, *scalars), (data, *history))
