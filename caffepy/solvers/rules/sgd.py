"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.solvers.base import SOLVERS, Solver


@expression
def sgd_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    change = rate * lr_mult * gradient + momentum * history
    return data if found_inf > 0 else data - change, history if found_inf > 0 else change


@SOLVERS.register("SGD")
class SGDSolver(Solver):
    """h = momentum * h + rate * g;  w = w - h.

    g is the gradient, normalised and regularised: scale * diff + decay * w (L2) or decay * sign(w) (L1). The rate is
    inside the history, as in Caffe, so a change of rate does not act on steps already taken.

    Defined by Caffe's `sgd_solver.cpp`; Bottou, "Stochastic Gradient Descent Tricks", 2012.
    """

    rule = sgd_update

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, momentum
