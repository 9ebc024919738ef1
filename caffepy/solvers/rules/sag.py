"""Stochastic gradient descent along an average of the gradients (NVIDIA Caffe's SAG)."""

from __future__ import annotations

from caffepy.backend import Channel, Each, Expression, Scalar, expression
from caffepy.solvers.base import SOLVERS
from caffepy.solvers.rules.larc import sag_rate
from caffepy.solvers.rules.sgd import SGDSolver, sgd_update


@expression
def sag_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    mean = momentum * history + (1 - momentum) * gradient
    change = rate * lr_mult * mean
    return data if found_inf > 0 else data - change, history if found_inf > 0 else mean


@expression
def sag_decoupled_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    mean = momentum * history + (1 - momentum) * scale * diff
    change = rate * lr_mult * (mean + decay_mult * l2 * data)
    return data if found_inf > 0 else data - change, history if found_inf > 0 else mean


@SOLVERS.register("SAG")
class SAGSolver(SGDSolver):
    """h = momentum * h + (1 - momentum) * g;  w = w - rate * h.

    g is as in `SGDSolver`. LARC's rates come from the norm of h. With `solver_mode: CPU` the update is SGD's, which is
    what NVIDIA Caffe computes on a CPU.

    Defined by NVIDIA Caffe's `sag_solver.cpp` and `sag_solver.cu`.
    """

    rule = sag_update
    decoupled_rule = sag_decoupled_update
    larc_rate = sag_rate
    turbo_from = 2

    def update_rule(self) -> Expression:
        return sgd_update if self.as_nvidia_on_cpu else super().update_rule()
