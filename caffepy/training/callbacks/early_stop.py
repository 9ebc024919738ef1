"""Early stopping: a callback that ends training when a test's score has not become better for some tests."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from caffepy.errors import ConfigError
from caffepy.training.retention import TestScore
from caffepy.utils.options import score_and_patience

if TYPE_CHECKING:
    from caffepy.training.solver import Solver

log = logging.getLogger(__name__)


class EarlyStop:
    """Stops training after `patience` tests in a row without a better score; on rank 0's first device.

    A resumed training counts from its first test.

    Args:
        given: ``SCORE:PATIENCE``, as `--early-stop` gives it.
        solver: whose tests count.

    Raises:
        ConfigError: the text has another form, or no test net has the score.
    """

    def __init__(self, given: str, solver: Solver) -> None:
        try:
            score_and_patience(given)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--early-stop: {error}") from error
        name, _, patience = given.rpartition(":")
        self._score = TestScore("--early-stop", name, solver.test_nets, solver.param.test_interval)
        self._patience = int(patience)
        self._best = -math.inf
        self._best_iteration = 0
        self._tests = 0
        """Tests since the best score."""

    def after_test(self, solver: Solver, scores: Sequence[dict[str, np.ndarray]]) -> bool:
        """Compare a test's score with the best one; return True when the patience is used up."""
        value = self._score.value(scores)
        if value is None:
            return False
        if value * self._score.sign > self._best:
            self._best, self._best_iteration, self._tests = value * self._score.sign, solver.iteration, 0
            return False
        self._tests += 1
        if self._tests < self._patience:
            return False
        log.info(
            "Early stop: %s has not become better than %.6g, of iteration %d, in %d test%s",
            self._score.name,
            self._best * self._score.sign,
            self._best_iteration,
            self._tests,
            "s" * (self._tests > 1),
        )
        return True
