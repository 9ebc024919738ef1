"""Layer-wise adaptive rate control: a learning rate for each parameter, from the norms of its values and its gradient.

Owns the rates that take the place of lr_mult in SGD and SAG solvers with `larc: true`. Everything runs on the device,
so that an iteration can be captured. Defined by NVIDIA Caffe's `sgd_solver.cpp` and `sag_solver.cpp` (GetLocalRate);
You, Gitman and Ginsburg, arXiv:1708.03888, 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from caffepy.backend import Each, Expression, Scalar, expression
from caffepy.backend.types import Array
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import SolverParameter

TURBO_MOMENTUM = 0.95
"""Share of the old correlation of gradient and history in the new one."""
TURBO_FACTOR = 0.9
"""How much of the correlation `larc_turbo` takes off the rate."""


@expression
def norm_terms(
    data: Each, diff: Each, history: Each, decay_mult: Scalar, scale: Scalar, l2: Scalar, l1: Scalar
) -> tuple[Each, Each, Each, Each]:
    sign = 1.0 if data > 0 else (-1.0 if data < 0 else 0.0)
    gradient = scale * diff + decay_mult * (l2 * data + l1 * sign)
    return data * data, gradient * gradient, history * history, gradient * history


@expression
def sgd_rate(
    data2: Each, gradient2: Each, history2: Each, product: Each, correlation: Each, lr_mult: Each,
    rate: Scalar, momentum: Scalar, turbo: Scalar, eta: Scalar, clip: Scalar, found_inf: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    both = data2 > 0 and gradient2 > 0
    trust = (1 - momentum) * eta * sqrt(data2) / sqrt(gradient2) if both else 1.0
    cosine = product / (sqrt(gradient2) * sqrt(history2)) if gradient2 > 0 and history2 > 0 else 0.0
    mean = TURBO_MOMENTUM * correlation + (1 - TURBO_MOMENTUM) * cosine
    local = trust - TURBO_FACTOR * mean if turbo > 0 else trust
    wanted = local if lr_mult > 0 else lr_mult
    clipped = min(rate, wanted) / rate if rate > 0 else 0.0
    return clipped if clip > 0 else wanted, correlation if found_inf > 0 or turbo <= 0 else mean


@expression
def sag_rate(
    data2: Each, gradient2: Each, history2: Each, product: Each, correlation: Each, lr_mult: Each,
    rate: Scalar, momentum: Scalar, turbo: Scalar, eta: Scalar, clip: Scalar, found_inf: Scalar,
) -> tuple[Each, Each]:  # fmt: skip
    trust = eta * sqrt(data2) / sqrt(history2) if data2 > 0 and history2 > 0 else 1.0
    cosine = product / (sqrt(gradient2) * sqrt(history2)) if gradient2 > 0 and history2 > 0 else 0.0
    mean = TURBO_MOMENTUM * correlation + (1 - TURBO_MOMENTUM) * cosine
    boost = 1 - TURBO_FACTOR * mean if turbo > 0 else 1.0
    wanted = boost * (trust if lr_mult > 0 else lr_mult)
    clipped = min(rate, wanted) / rate if rate > 0 else 0.0
    return clipped if clip > 0 else wanted, correlation if found_inf > 0 or turbo <= 0 else mean


@expression
def spread(rate: Scalar) -> Each:
    return rate


class Larc:
    """The rates of a net's parameters.

    Args:
        net: holds the parameters.
        param: the solver.
        history: the update rule's memory.
        rate: `sgd_rate` or `sag_rate`.
        decay_in_gradient: whether the gradient's norm includes weight decay, as in NVIDIA Caffe's CPU mode.
    """

    def __init__(
        self, net: Net, param: SolverParameter, history: Array, rate: Expression, decay_in_gradient: bool
    ) -> None:
        self._net = net
        self._backend = net.backend
        self._history = history
        self._rate = rate
        self._decay_in_gradient = decay_in_gradient
        self._eta, self._clip = param.larc_eta, float(param.larc_policy == "clip")
        self._learned = [parameter for parameter in net.parameters.parameters if parameter.lr_mult != 0]
        count = len(self._learned)
        self._terms = [self._backend.zeros((count,)) for _ in range(4)]
        self._lr_mult, self._rates = self._backend.zeros((count,)), self._backend.zeros((count,))
        lr_mult = [parameter.lr_mult for parameter in self._learned]
        self._backend.from_host(np.array(lr_mult, np.float32), self._lr_mult)
        self.correlation = self._backend.zeros((count,))
        """Moving average of each learned parameter's cosine between gradient and history, for `larc_turbo`."""
        self._multipliers = net.parameters.multipliers()[0]

    def restore(self, correlation: Sequence[float]) -> None:
        """Take over the correlations of a snapshot; where it has none, as one of NVIDIA Caffe's, they begin at 0."""
        values = np.array(correlation, np.float32)
        fits = values.shape == tuple(self.correlation.shape)
        self._backend.from_host(values if fits else np.zeros(self.correlation.shape, np.float32), self.correlation)

    def multipliers(
        self, scales: Sequence[Array | float], found_inf: Array | float, values: Sequence[Array | float]
    ) -> Array:
        """What takes the place of lr_mult, for each block of the flat buffers.

        Args:
            scales: factors of the gradient, of L2 and of L1 decay.
            found_inf: not 0 where the gradients are not finite.
            values: learning rate, momentum, and whether turbo acts (1) or not (0).
        """
        backend, buffers = self._backend, self._net.parameters
        scale, l2, l1 = scales if self._decay_in_gradient else (scales[0], 0.0, 0.0)
        flats = (buffers.data, buffers.diff, self._history)
        for index, parameter in enumerate(self._learned):
            elements = slice(parameter.start, parameter.stop)
            arrays = [flat[elements] for flat in flats]
            sums = [term[index : index + 1].reshape(()) for term in self._terms]
            backend.reduce(norm_terms, (*arrays, parameter.decay_mult, scale, l2, l1), sums)
        inputs = (*self._terms, self.correlation, self._lr_mult, *values, self._eta, self._clip, found_inf)
        backend.apply(self._rate, inputs, (self._rates, self.correlation))
        for index, parameter in enumerate(self._learned):
            blocks = self._multipliers[buffers.block_range(parameter)]
            backend.apply(spread, (self._rates[index : index + 1].reshape(()),), (blocks,))
        return self._multipliers
