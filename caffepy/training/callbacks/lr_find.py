"""The learning-rate range test (`--lr-find`): the loss while the rate rises from one iteration to the next.

Leslie Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.logs.plot import draw_rates

if TYPE_CHECKING:
    from caffepy.training.solver import Solver

log = logging.getLogger(__name__)

FIRST_RATE, LAST_RATE = 1e-6, 10.0
ITERATIONS = 200
"""Iterations of the test if --max-iter is not given."""
_SMOOTHING = 0.9
"""Weight of the earlier losses in the running mean."""
_SKIPPED = 5
"""Iterations at the start whose slope does not count: the running mean has few losses."""
_WINDOW = 1 / 3
"""Width of the part of the curve whose slope counts, in decades of the rate."""
_DIVERGED = 4.0
"""The test ends when the mean loss is this many times the smallest one, and above the first one."""


def rising_rates(param: SolverParameter, iterations: int | None) -> None:
    """Change a solver so that the rate rises from `FIRST_RATE` to `LAST_RATE`; no tests, no snapshots, no display.

        rate_t = FIRST_RATE (LAST_RATE / FIRST_RATE)^(t / (iterations - 1))

    Args:
        param: the solver; changed in place.
        iterations: of the test; None: `ITERATIONS`.

    Raises:
        ConfigError: there are no iterations.
    """
    if iterations == 0:
        raise ConfigError("--lr-find without an iteration finds nothing; give --max-iter 1 or more, or leave it out")
    param.max_iter = iterations or ITERATIONS
    for name in ("test_net", "test_net_param", "test_iter", "test_state"):
        param.ClearField(name)
    for name in (
        "test_interval",
        "test_and_snapshot_last_epochs",
        "warmup_iter",
        "warmup_start_lr",
        "rampup_interval",
        "rampup_lr",
        "min_lr",
        "snapshot",
        "display",
    ):
        param.ClearField(name)
    param.snapshot_after_train = False
    param.lr_policy, param.base_lr = "exp", FIRST_RATE
    param.gamma = (LAST_RATE / FIRST_RATE) ** (1 / max(param.max_iter - 1, 1))
    param.average_loss = 2  # then the loss of every iteration is read, also on a GPU


class LearningRateFinder:
    """A callback that collects rates and losses, ends training when the loss rises, and draws the picture.

    Args:
        path: the picture, ending in .png, .svg or .pdf.
    """

    waits = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rates: list[float] = []
        self._losses: list[float] = []
        self._means: list[float] = []
        self._finished = False

    def after_iteration(self, solver: Solver) -> bool:
        """Take an iteration's loss; return True at the end of the test."""
        if self._finished:  # several devices stop some iterations later
            return True
        loss = solver.losses.values()[-1]
        if math.isfinite(loss):
            self._rates.append(solver.hyperparameters.rate)
            self._losses.append(loss)
            self._means = running_means(self._losses)
        self._finished = not math.isfinite(loss) or self._diverged() or solver.iteration >= solver.param.max_iter
        if self._finished:
            self._finish(solver)
        return self._finished

    def _diverged(self) -> bool:
        last, best = self._means[-1], min(self._means)
        return len(self._means) > _SKIPPED and last > _DIVERGED * best and last > self._means[0]

    def _finish(self, solver: Solver) -> None:
        chosen = steepest_rate(self._rates, self._means)
        if chosen is None:
            log.warning(
                "the loss did not fall at any learning rate from %g on in %d iterations: give more with --max-iter, "
                "or look at the net and its data",
                FIRST_RATE,
                solver.iteration,
            )
        if not self._rates:
            return
        draw_rates(self._path, self._rates, self._losses, self._means, chosen)
        log.info("Drew the loss over learning rates from %g to %.3g to %s", FIRST_RATE, self._rates[-1], self._path)
        if chosen is not None:
            lowest = self._rates[int(np.argmin(self._means))]
            log.info("The loss falls fastest at learning rate %.2g, and is smallest at %.2g", chosen, lowest)
            log.info("To train with this rate: --set base_lr=%.2g", chosen)


def running_means(losses: list[float]) -> list[float]:
    """Return exponential running means, divided by the sum of their weights."""
    means, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        weight = _SMOOTHING * weight + 1 - _SMOOTHING
        means.append(mean / weight)
    return means


def steepest_rate(rates: list[float], means: list[float]) -> float | None:
    """Return the rate at which the mean loss falls fastest over the rate's logarithm, up to its minimum.

    The slope at a rate is that of the line that fits the losses within a third of a decade around it.

    Returns:
        The rate; None if the loss does not fall.
    """
    stop = int(np.argmin(means)) + 1 if means else 0
    logs, losses = np.log10(rates[:stop]), np.array(means[:stop])
    slopes = {}
    for index in range(_SKIPPED, stop):
        near = np.abs(logs - logs[index]) <= _WINDOW / 2
        if near.sum() > 1:
            slopes[index] = float(np.polyfit(logs[near], losses[near], 1)[0])
    best = min(slopes, key=lambda index: slopes[index], default=None)
    return rates[best] if best is not None and slopes[best] < 0 else None
