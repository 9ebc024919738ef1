"""RMSProp: rates from a moving average of the squared gradient."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.solvers.base import SOLVERS, Solver


@expression
def rmsprop_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, decay: Scalar, delta: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    mean = decay * history + (1 - decay) * gradient * gradient
    change = rate * lr_mult * gradient / (sqrt(mean) + delta)
    return data if found_inf > 0 else data - change, history if found_inf > 0 else mean


@SOLVERS.register("RMSProp")
class RMSPropSolver(Solver):
    """h = rms_decay * h + (1 - rms_decay) * g^2;  w = w - rate * g / (sqrt(h) + delta).

    g is as in `SGDSolver`; there is no momentum.

    Defined by Caffe's `rmsprop_solver.cpp`; Tieleman and Hinton, Coursera lecture 6.5, 2012.
    """

    rule = rmsprop_update
    least_delta = 1e-4

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        return rate, self.param.rms_decay, self.delta
