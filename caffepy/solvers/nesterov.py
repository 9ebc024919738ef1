"""Nesterov's accelerated gradient."""

from __future__ import annotations

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def nesterov_update(
    data: Each, diff: Each, history: Each, scale: Scalar, l2: Scalar, l1: Scalar, rate: Scalar, momentum: Scalar
) -> tuple[Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    new = rate * (scale * diff + l2 * data + l1 * sign) + momentum * history
    return data - ((1 + momentum) * new - momentum * history), new


@SOLVERS.register("Nesterov")
class NesterovSolver(Solver):
    """h' = momentum * h + rate * g;  w = w - ((1 + momentum) * h' - momentum * h).

    The gradient g is taken where the momentum leads; the parameters kept are those after that look ahead. g and its
    regularisation are as in `SGDSolver`.

    Defined by Caffe's `nesterov_solver.cpp`; Nesterov, 1983; Sutskever et al., ICML 2013.
    """

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        arguments = (data, diff, history[0], step.scale, step.l2, step.l1, step.rate, step.momentum)
        self.backend.apply(nesterov_update, arguments, (data, history[0]))
