"""From what a command line or a program gives to the options of a run, for `caffepy train` and `caffepy.train`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import check_solver
from caffepy.errors import ConfigError
from caffepy.options.declaration import with_values
from caffepy.parallel.launch.run import BATCH_RANKS, SINCE
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.proto.caffe_pb2 import SolverParameter

logger = logging.getLogger(__name__)


def train_options(param: SolverParameter, path: Path | None, values: Mapping[str, Any], **further: Any) -> TrainOptions:
    """The training of a solver, with the options that were given on a command line or by a program.

    Args:
        param: the solver as read; level, stages, weights and iter_size are changed as the options say.
        path: its file, for messages and relative paths; None: it is none.
        values: the options that `TrainOptions` declares, by name; `snapshot` may be "auto".
        further: other fields of `TrainOptions`.

    Raises:
        ConfigError: the solver is wrong.
    """
    given, snapshot = dict(values), values.get("snapshot")
    check_solver(param, str(path or "solver"))
    if given.get("level") is not None:
        param.train_state.level = given["level"]
    stages = given.get("stage", ())
    param.train_state.stage.extend([stages] if isinstance(stages, str) else stages)
    if snapshot or given.get("weights"):
        del param.weights[:]
    keep_global_batch(param)
    given["snapshot"] = Path(snapshot) if snapshot and snapshot != "auto" else None
    if given.get("trace") is not None:
        given["trace"] = Path(given["trace"])
    plain = TrainOptions(
        param,
        resolve=PathResolver(path),
        resume_newest=snapshot == "auto",
        resume_since=first_launch_time(),
        **further,
    )
    return with_values(plain, given)


def keep_global_batch(param: SolverParameter) -> None:
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
