"""What `caffepy train` and `caffepy.train` do to a solver before they train it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence

from caffepy.config.solver_check import check_solver
from caffepy.errors import ConfigError
from caffepy.parallel.launch.run import BATCH_RANKS, SINCE
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.proto.caffe_pb2 import SolverParameter

logger = logging.getLogger(__name__)


def prepare_solver(
    param: SolverParameter, origin: str, brings_weights: bool, level: int | None = None, stages: Sequence[str] = ()
) -> None:
    """Check a solver, and put into it what was said beside it.

    Args:
        param: as read; changed.
        origin: its file, for messages.
        brings_weights: weights or a snapshot are given, which replace the solver's own `weights`.
        level: the net's level; None: the solver's.
        stages: further stages of the net.

    Raises:
        ConfigError: what is wrong with it.
    """
    check_solver(param, origin)
    if level is not None:
        param.train_state.level = level
    param.train_state.stage.extend(stages)
    if brings_weights:
        del param.weights[:]
    keep_batch_of_all(param)


def keep_batch_of_all(param: SolverParameter) -> None:
    """Multiply iter_size where `caffepy launch` goes on with fewer ranks than the prototxts were written for.

    Raises:
        ConfigError: the samples of an iteration cannot be divided so.
    """
    launcher, before = find_launcher(), int(_launched_with(BATCH_RANKS))
    ranks = launcher.size if launcher else None
    if not before or not ranks or ranks == before:
        return
    passes = param.iter_size * before
    if passes % ranks:
        raise ConfigError(
            f"the samples of {before} ranks cannot be divided among {ranks}: an iteration has {passes} batches in all; "
            f"start as many ranks as divide {passes}"
        )
    param.iter_size = passes // ranks
    logger.info("%d ranks train for %d: iter_size is %d", ranks, before, param.iter_size)


def first_launch_time() -> float | None:
    """When `caffepy launch` started the job first, in seconds since 1970; None where it starts none again.

    Raises:
        ConfigError: its variable holds no number.
    """
    return _launched_with(SINCE) if SINCE in os.environ else None


def _launched_with(name: str) -> float:
    """A number that `caffepy launch` sets; 0 where it does not.

    Raises:
        ConfigError: it is none.
    """
    try:
        number = float(os.environ.get(name, "0"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is '{os.environ[name]}'; caffepy launch alone sets it, to a number: unset it")
    return number
