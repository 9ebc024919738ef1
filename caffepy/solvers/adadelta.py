"""AdaDelta: steps in the units of the parameters, from moving averages of gradients and steps."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def adadelta_update(
    data: Each,
    diff: Each,
    gradients: Each,
    steps: Each,
    scale: Scalar,
    l2: Scalar,
    l1: Scalar,
    rate: Scalar,
    decay: Scalar,
    delta: Scalar,
) -> tuple[Each, Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + l2 * data + l1 * sign
    mean = decay * gradients + (1 - decay) * gradient * gradient
    change = gradient * sqrt((steps + delta) / (mean + delta))
    return data - rate * change, mean, decay * steps + (1 - decay) * change * change


@SOLVERS.register("AdaDelta")
class AdaDeltaSolver(Solver):
    """h = d h + (1 - d) g^2;  s = g sqrt((u + delta) / (h + delta));  u = d u + (1 - d) s^2;  w = w - rate s.

    d is `momentum`; g is as in `SGDSolver`. Its history is h of all parameters, then u of all parameters.

    Defined by Caffe's `adadelta_solver.cpp`; Zeiler, arXiv:1212.5701, 2012.
    """

    histories = 2

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        scalars = (step.scale, step.l2, step.l1, step.rate, step.momentum, self.param.delta)
        self.backend.apply(adadelta_update, (data, diff, *history, *scalars), (data, *history))
