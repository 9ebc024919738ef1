"""AdaGrad: rates that shrink with the squared gradients seen so far."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def adagrad_update(
    data: Each, diff: Each, history: Each, scale: Scalar, l2: Scalar, l1: Scalar, rate: Scalar, delta: Scalar
) -> tuple[Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + l2 * data + l1 * sign
    total = history + gradient * gradient
    return data - rate * gradient / (sqrt(total) + delta), total


@SOLVERS.register("AdaGrad")
class AdaGradSolver(Solver):
    """h = h + g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGDSolver`; there is no momentum.

    Defined by Caffe's `adagrad_solver.cpp`; Duchi, Hazan and Singer, JMLR 2011.
    """

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        arguments = (data, diff, history[0], step.scale, step.l2, step.l1, step.rate, self.param.delta)
        self.backend.apply(adagrad_update, arguments, (data, history[0]))
