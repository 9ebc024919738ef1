"""Learning rate, momentum and weight decay as functions of the iteration, and their values on the device.

Formulas: `sgd_solver.cpp` of both Caffes; the extensions of NVIDIA (ramp-up, min_lr, policies for momentum and weight
decay) and of Intel (warm-up) do nothing unless their fields are set. Captured work reads the values as device scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caffepy.backend.types import Array, Counter
from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.net import Net
from caffepy.training.display import RootLog
from caffepy.training.stop_requests import FLAGS, StopRequests
from caffepy.utils.registry import Registry

Policy = Callable[[SolverParameter, int, int], "tuple[float, int]"]

POLICIES: Registry[Policy] = Registry("lr_policy")
NO_LOSS = 1e38
"""The smallest loss before the first one, as in the schema."""


def learning_rate(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """The rate of an iteration and the step that the policy is in from now on.

    While iteration < rampup_interval: rampup_lr + (base_lr - rampup_lr) * (iteration / rampup_interval)^2.
    While iteration < warmup_iter: warmup_start_lr + (base_lr - warmup_start_lr) * iteration / warmup_iter.
    Never below min_lr.

    Args:
        param: the solver.
        iteration: updates made so far.
        current_step: steps made so far, which `multistep` goes on from.

    Raises:
        ConfigError: the policy is unknown, or its rate is not finite.
    """
    if iteration < param.rampup_interval:
        alpha = iteration / param.rampup_interval
        rate = param.rampup_lr + (param.base_lr - param.rampup_lr) * alpha * alpha
    elif iteration < param.warmup_iter:
        rate = warmup_rate(param, iteration)
    else:
        rate, current_step = POLICIES.get(param.lr_policy, "solver")(param, iteration, current_step)
    if not math.isfinite(rate):
        raise ConfigError(
            f"solver: lr_policy '{param.lr_policy}' makes the learning rate of iteration {iteration} {rate:g} "
            f"(base_lr {param.base_lr:g}, gamma {param.gamma:g}, power {param.power:g}); use smaller numbers"
        )
    return max(rate, param.min_lr), current_step


def warmup_rate(param: SolverParameter, iteration: int) -> float:
    """The rate in Intel Caffe's warm-up; before iteration 0 that of iteration 0."""
    alpha = max(iteration, 0) / param.warmup_iter
    return param.warmup_start_lr + (param.base_lr - param.warmup_start_lr) * alpha


def power(base: float, exponent: float) -> float:
    """base^exponent as C's pow gives it for base >= 0: inf where it is beyond the largest double, or 0^-1."""
    try:
        result: float = base**exponent
    except (OverflowError, ZeroDivisionError):
        return math.inf
    return result


@POLICIES.register("fixed")
def fixed(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr."""
    return param.base_lr, current_step


@POLICIES.register("step")
def step(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * gamma^floor(iteration / stepsize)."""
    current_step = iteration // param.stepsize
    return param.base_lr * power(param.gamma, current_step), current_step


@POLICIES.register("exp")
def exp(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * gamma^iteration."""
    return param.base_lr * power(param.gamma, iteration), current_step


@POLICIES.register("inv")
def inv(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * (1 + gamma * iteration)^-power."""
    return param.base_lr * power(1 + param.gamma * iteration, -param.power), current_step


@POLICIES.register("multistep")
def multistep(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * gamma^(number of stepvalues reached); one step at most in one iteration, as in Caffe."""
    if current_step < len(param.stepvalue) and iteration >= param.stepvalue[current_step]:
        current_step += 1
    return param.base_lr * power(param.gamma, current_step), current_step


@POLICIES.register("multifixed")
def multifixed(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """The rate in stagelr of the first stage whose stageiter is not below the iteration, else the last one."""
    stages = enumerate(param.stageiter)
    stage = next((index for index, last in stages if iteration <= last), len(param.stagelr) - 1)
    return param.stagelr[stage], stage


@POLICIES.register("stepearly")
def stepearly(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * gamma^(steps taken), which `StepEarly` counts."""
    return param.base_lr * power(param.gamma, current_step), current_step


@dataclass
class StepEarly:
    """What the learning-rate policy "stepearly" remembers: a step down where tests have not improved for some time.

    Defined by BVLC Caffe's pull request 190, an example of which SegNet's Caffe contains.

    Args:
        best: the largest score so far.
        tests: tests since then or since the last step.
    """

    best: float = -NO_LOSS
    tests: int = 0

    def next_step(self, score: float, step: int, patience: int) -> int:
        """The number of steps taken after a test, of which each multiplies the rate by gamma."""
        if score > self.best:
            self.best, self.tests = score, 0
            return step
        self.tests += 1
        if self.tests < patience:
            return step
        self.tests = 0
        return step + 1


@POLICIES.register("plateau")
def plateau(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr * gamma^(steps taken), which `Plateau` counts."""
    return param.base_lr * power(param.gamma, current_step), current_step


@dataclass
class Plateau:
    """What the learning-rate policy "plateau" remembers: a step down whenever the loss has not fallen for some time.

    Defined by the solver of Caffe's SSD branch; NVIDIA Caffe has its fields without effect.

    Args:
        minimum_loss: the smallest loss so far, as averaged by `average_loss`.
        last_event: the iteration of that loss or of the last step.
    """

    minimum_loss: float = NO_LOSS
    last_event: int = 0

    def next_step(self, iteration: int, loss: float | None, step: int, windows: Sequence[int]) -> int:
        """The number of steps taken, of which each multiplies the rate by gamma."""
        if loss is not None and loss < self.minimum_loss:
            self.minimum_loss, self.last_event = loss, iteration
        if step < len(windows) and iteration >= self.last_event + windows[step]:
            self.last_event = iteration
            return step + 1
        return step


@POLICIES.register("poly")
def poly(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """(base_lr - min_lr) * (1 - iteration / max_iter)^power + min_lr; the end value from max_iter on."""
    remaining = max(1 - iteration / max(param.max_iter, 1), 0.0)
    return (param.base_lr - param.min_lr) * power(remaining, param.power) + param.min_lr, current_step


@POLICIES.register("sigmoid")
def sigmoid(param: SolverParameter, iteration: int, current_step: int) -> tuple[float, int]:
    """base_lr / (1 + exp(-gamma * (iteration - stepsize))), which falls where gamma < 0."""
    exponent = min(-param.gamma * (iteration - param.stepsize), 700.0)  # e^700 is near the largest double
    return param.base_lr / (1 + math.exp(exponent)), current_step


def momentum(param: SolverParameter, iteration: int, rate: float) -> float:
    """The momentum of an iteration (NVIDIA Caffe's momentum_policy).

    In the warm-up of an SGD solver, momentum * rate / rate of the iteration before, as in Intel Caffe; where that rate
    is 0, momentum. fixed: momentum. poly: momentum + (max_momentum - momentum) * (iteration / max_iter)^momentum_power.
    opt: (1 - sqrt(rate) / 2)^2, at most max_momentum where that is given.
    """
    if param.type == "SGD" and param.rampup_interval <= iteration < param.warmup_iter:
        before = warmup_rate(param, iteration - 1)
        return param.momentum * (rate / before if before else 1.0)
    if param.momentum_policy == "poly":
        way = power(iteration / max(param.max_iter, 1), param.momentum_power)
        return param.momentum + (param.max_momentum - param.momentum) * way
    if param.momentum_policy == "opt":
        best = (1 - 0.5 * math.sqrt(rate)) ** 2
        return min(best, param.max_momentum) if param.HasField("max_momentum") else best
    return param.momentum


def weight_decay(param: SolverParameter, iteration: int, nvidia: bool = False) -> float:
    """The weight decay of an iteration (NVIDIA Caffe's weight_decay_policy).

    Args:
        param: the solver.
        iteration: updates made so far.
        nvidia: whether solvers in CPU mode have the policy "fixed", as in NVIDIA Caffe.

    fixed: weight_decay. poly: weight_decay + (max_weight_decay - weight_decay) * (iteration /
    max_iter)^weight_decay_power.
    """
    if param.weight_decay_policy == "poly" and not (nvidia and param.solver_mode == SolverParameter.CPU):
        way = power(iteration / max(param.max_iter, 1), param.weight_decay_power)
        return param.weight_decay + (param.max_weight_decay - param.weight_decay) * way
    return param.weight_decay


SCALE, L2, L1, RULE = range(len(FLAGS), len(FLAGS) + 4)
"""Indices of the device scalars behind the flags: factors of gradient and regularisation, then the rule's numbers."""


class Hyperparameters:
    """The device scalars of an iteration: requests, the update's factors, where each pass's random numbers begin.

    Args:
        param: the solver.
        net: the train net.
        requests: of this device, which travel with the gradients.
        numbers: the update's, by iteration, learning rate and momentum; as many in every iteration.
        loss: gives the mean loss of the last iterations and all devices, None before the first one, for the policy
            "plateau".
        log: for the steps of the learning rate.
    """

    def __init__(
        self,
        param: SolverParameter,
        net: Net,
        requests: StopRequests,
        numbers: Callable[[int, float, float], tuple[float, ...]],
        loss: Callable[[], float | None],
        log: RootLog,
    ) -> None:
        self.rate = self.momentum = self.weight_decay = 0.0
        """Of the iteration for which `send` was called last."""
        self.current_step = 0
        """The number of steps that the learning rate's policy has taken."""
        self.plateau = Plateau()
        """What the policy "plateau" remembers."""
        self.step_early = StepEarly()
        """What the policy "stepearly" remembers."""
        self._param = param
        self._net = net
        self._requests = requests
        self._numbers = numbers
        self._loss = loss
        self._log = log
        count = RULE + len(numbers(0, 0.0, 0.5))
        self._scalars = net.backend.device_scalars(count, param.iter_size)

    def learning_rate(self, iteration: int) -> float:
        """The rate of an iteration, as far as it does not depend on the next loss."""
        return learning_rate(self._param, iteration, self.current_step)[0]

    def send(self, iteration: int, passes: range) -> None:
        """Copy the numbers of an iteration to the device.

        Args:
            iteration: how many were made before.
            passes: the numbers of its forward passes.
        """
        param, context = self._param, self._net.context
        self.rate = self._next_rate(iteration)
        self.momentum = momentum(param, iteration, self.rate)
        self.weight_decay = decay = weight_decay(param, iteration, context.nvidia)
        l1 = param.regularization_type == "L1"
        scales = [1 / param.iter_size, 0.0 if l1 else decay, decay if l1 else 0.0]
        counters = [(n, context.first_sample(n) if context.first_sample else 0) for n in passes]
        values = [*self._requests.flags(), *scales, *self._numbers(iteration, self.rate, self.momentum)]
        self._scalars.send(values, counters)

    def note_score(self, iteration: int, score: float) -> None:
        """Take a test's first score, for the policy "stepearly"; the same on every device."""
        step = self.step_early.next_step(score, self.current_step, self._param.stepearly)
        if step != self.current_step:
            self._log("StepEarly Status: Iteration %d, step = %d", iteration, step)
        self.current_step = step

    def _next_rate(self, iteration: int) -> float:
        if self._param.lr_policy == "plateau":
            step = self.plateau.next_step(iteration, self._loss(), self.current_step, self._param.plateau_winsize)
            if step != self.current_step:
                self._log("Plateau Status: Iteration %d, step = %d", iteration, step)
            self.current_step = step
        rate, step = learning_rate(self._param, iteration, self.current_step)
        if step != self.current_step and self._param.lr_policy == "multistep":
            self._log("MultiStep Status: Iteration %d, step = %d", iteration, step)
        self.current_step = step
        return rate

    @property
    def shown(self) -> tuple[float, float, float]:
        """Learning rate, momentum and weight decay of the iteration for which `send` was called last."""
        return self.rate, self.momentum, self.weight_decay

    @property
    def flags(self) -> Array:
        """What `Requests.flags` gave, float32 (2,)."""
        return self._scalars.array[: len(FLAGS)]

    def counter(self, index: int) -> Counter | None:
        """Where the random numbers of one of the iteration's passes begin; None where the host counts passes."""
        return self._scalars.counters[index]

    def factors(self) -> tuple[Array | float, Array | float, Array | float, Sequence[Array | float]]:
        """What `Update.run` takes: the gradients' scale, L2 and L1 decay, and the rule's numbers."""
        values = self._scalars.values
        return values[SCALE], values[L2], values[L1], values[RULE:]
