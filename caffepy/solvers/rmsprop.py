"""RMSProp: rates from a moving average of the squared gradient."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def rmsprop_update(
    data: Each,
    diff: Each,
    history: Each,
    scale: Scalar,
    l2: Scalar,
    l1: Scalar,
    rate: Scalar,
    decay: Scalar,
    delta: Scalar,
) -> tuple[Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + l2 * data + l1 * sign
    mean = decay * history + (1 - decay) * gradient * gradient
    return data - rate * gradient / (sqrt(mean) + delta), mean


@SOLVERS.register("RMSProp")
class RMSPropSolver(Solver):
    """h = rms_decay * h + (1 - rms_decay) * g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGDSolver`; there is no momentum.

    Defined by Caffe's `rmsprop_solver.cpp`; Tieleman and Hinton, Coursera lecture 6.5, 2012.
    """

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        scalars = (step.scale, step.l2, step.l1, step.rate, self.param.rms_decay, self.param.delta)
        self.backend.apply(rmsprop_update, (data, diff, history[0], *scalars), (data, history[0]))
