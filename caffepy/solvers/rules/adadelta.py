"""AdaDelta: steps in the units of the parameters, from moving averages of gradients and steps."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.solvers.base import SOLVERS, Solver


@expression
def adadelta_update(
    data: Each, diff: Each, gradients: Each, steps: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, decay: Scalar, delta: Scalar,
) -> tuple[Each, Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    mean = decay * gradients + (1 - decay) * gradient * gradient
    step = gradient * sqrt((steps + delta) / (mean + delta))
    change = rate * lr_mult * step
    new = data - change
    next_steps = decay * steps + (1 - decay) * step * step
    return data if found_inf > 0 else new, gradients if found_inf > 0 else mean, steps if found_inf > 0 else next_steps


@SOLVERS.register("AdaDelta")
class AdaDeltaSolver(Solver):
    """h = d h + (1 - d) g^2;  s = g sqrt((u + delta) / (h + delta));  u = d u + (1 - d) s^2;  w = w - rate s.

    d is `momentum`; g is as in `SGDSolver`. Its history is h of all parameters, then u of all parameters.

    Defined by Caffe's `adadelta_solver.cpp`; Zeiler, arXiv:1212.5701, 2012.
    """

    histories = 2
    rule = adadelta_update
    least_delta = 1e-3

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum, self.delta
