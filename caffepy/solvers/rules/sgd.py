"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import ClassVar

from caffepy.backend import Channel, Each, Expression, Scalar, expression
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers.base import SOLVERS, Solver
from caffepy.solvers.rules.larc import Larc, sgd_rate


@expression
def sgd_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    change = rate * lr_mult * gradient + momentum * history
    return data if found_inf > 0 else data - change, history if found_inf > 0 else change


@expression
def sgd_decoupled_update(
    data: Each, diff: Each, history: Each, lr_mult: Channel, decay_mult: Channel,
    scale: Scalar, l2: Scalar, l1: Scalar, found_inf: Scalar, rate: Scalar, momentum: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    step = rate * lr_mult * scale * diff + momentum * history
    change = step + rate * lr_mult * decay_mult * l2 * data
    return data if found_inf > 0 else data - change, history if found_inf > 0 else step


@SOLVERS.register("SGD")
class SGDSolver(Solver):
    """h = momentum * h + rate * g;  w = w - h.

    g is the gradient, normalised and regularised: scale * diff + decay * w (L2) or decay * sign(w) (L1). The rate is
    inside the history, as in Caffe, so a change of rate does not act on steps already taken. With regularization_type
    "WD" g has no decay, and w is made smaller by rate * decay * w besides.

    Defined by Caffe's `sgd_solver.cpp` and NVIDIA's `sgd_solver.cu`; Bottou, "Stochastic Gradient Descent Tricks",
    2012.
    """

    rule = sgd_update
    decoupled_rule: ClassVar[Expression] = sgd_decoupled_update
    larc_rate: ClassVar[Expression] = sgd_rate
    turbo_from: ClassVar[int] = 0
    """The first iteration in which `larc_turbo` acts."""

    def update_rule(self) -> Expression:
        return self.decoupled_rule if self.param.regularization_type == "WD" else self.rule

    def make_larc(self) -> Larc | None:
        if not self.param.larc:
            return None
        return Larc(self.net, self.param, self.history[0], self.larc_rate, decay_in_gradient=self.as_nvidia_on_cpu)

    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        if not self.param.larc:
            return rate, momentum
        return rate, momentum, float(self.param.larc_turbo and self.iteration >= self.turbo_from)

    @property
    def as_nvidia_on_cpu(self) -> bool:
        """Whether the formulas of NVIDIA Caffe's CPU mode are wanted where they differ from those of its GPU mode."""
        return self.net.context.nvidia and self.param.solver_mode == SolverParameter.CPU
