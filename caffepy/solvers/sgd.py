"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.base import Array
from caffepy.solvers.base import SOLVERS, Solver, Step


@expression
def sgd_update(
    data: Each, diff: Each, history: Each, scale: Scalar, l2: Scalar, l1: Scalar, rate: Scalar, momentum: Scalar
) -> tuple[Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    change = rate * (scale * diff + l2 * data + l1 * sign) + momentum * history
    return data - change, change


@SOLVERS.register("SGD")
class SGDSolver(Solver):
    """h = momentum * h + rate * g;  w = w - h.

    g is the gradient, normalised and regularised: scale * diff + decay * w (L2) or decay * sign(w) (L1). The rate is
    inside the history, as in Caffe, so a change of rate does not act on steps already taken.

    Defined by Caffe's `sgd_solver.cpp`; Bottou, "Stochastic Gradient Descent Tricks", 2012.
    """

    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        arguments = (data, diff, history[0], step.scale, step.l2, step.l1, step.rate, step.momentum)
        self.backend.apply(sgd_update, arguments, (data, history[0]))
