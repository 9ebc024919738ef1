"""Nesterov's accelerated gradient."""

from __future__ import annotations

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.solvers.base import SOLVERS, Solver


@expression
def nesterov_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    new = rate * lr_mult * gradient + momentum * history
    change = (1 + momentum) * new - momentum * history
    return data if found_inf > 0 else data - change, history if found_inf > 0 else new


@SOLVERS.register("Nesterov")
class NesterovSolver(Solver):
    """h' = momentum * h + rate * g;  w = w - ((1 + momentum) * h' - momentum * h).

    The gradient g is taken where the momentum leads; the parameters kept are those after that look ahead. g and its
    regularisation are as in `SGDSolver`.

    Defined by Caffe's `nesterov_solver.cpp`; Nesterov, 1983; Sutskever et al., ICML 2013.
    """

    rule = nesterov_update

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum
