"""AdaGrad: rates that shrink with the squared gradients seen so far."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.solvers.base import SOLVERS, Solver


@expression
def adagrad_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, delta: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    squares = history + gradient * gradient
    change = rate * lr_mult * gradient / (sqrt(squares) + delta)
    return data if found_inf > 0 else data - change, history if found_inf > 0 else squares


@SOLVERS.register("AdaGrad")
class AdaGradSolver(Solver):
    """h = h + g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGDSolver`; there is no momentum.

    Defined by Caffe's `adagrad_solver.cpp`; Duchi, Hazan and Singer, JMLR 2011.
    """

    rule = adagrad_update
    least_delta = 1e-3

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, self.delta
