"""Options of a training from a command line or a program, for `caffepy train` and `caffepy.train`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caffepy.distributed.launch.run import BATCH_RANKS, SINCE
from caffepy.distributed.processes.launcher import find_launcher
from caffepy.errors import ConfigError
from caffepy.formats.assign import assign
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.training.callbacks.lr_find import rising_rates
from caffepy.training.options import TrainOptions
from caffepy.training.solver_check import check_solver
from caffepy.utils.options import with_values

logger = logging.getLogger(__name__)


def configure(param: SolverParameter, path: Path | None, values: Mapping[str, Any]) -> None:
    """Set the fields of a solver and its nets that a command line or program gives, before anything is checked.

    Args:
        param: the solver as read; changed in place.
        path: its file, or None.
        values: options of `TrainOptions` by name, of which `set`, `max_iter`, `seed` and `dtype` count.

    Raises:
        ConfigError: there is no such field, or the value is none of it.
    """
    given = {name: values[name] for name in ("set", "max_iter", "seed", "dtype") if name in values}
    if isinstance(given.get("set"), str):
        given["set"] = [given["set"]]
    assignments = with_values(TrainOptions(param), given).assignments
    if assignments:
        assign(param, assignments, PathResolver(path))


def train_options(param: SolverParameter, path: Path | None, values: Mapping[str, Any], **further: Any) -> TrainOptions:
    """Return the options of a training, from a solver and the options of a command line or program.

    Args:
        param: the solver as read; level, stages, weights and iter_size are changed by the options.
        path: its file, for messages and relative paths, or None.
        values: options of `TrainOptions` by name; `snapshot` may be "auto".
        further: other fields of `TrainOptions`.

    Raises:
        ConfigError: the solver is invalid.
    """
    given, snapshot = dict(values), values.get("snapshot")
    if given.get("lr_find") is not None:
        rising_rates(param, given.get("max_iter"))
        given["lr_find"], given["keep_going"] = Path(given["lr_find"]), True
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
    """Increase iter_size if `caffepy launch` restarted with fewer ranks, to keep the global batch size.

    Raises:
        ConfigError: the batches of an iteration cannot be divided among the ranks.
    """
    launcher, before = find_launcher(), int(_launched_with(BATCH_RANKS))
    ranks = launcher.size if launcher else None
    if not before or not ranks or ranks == before:
        return
    passes = param.iter_size * before
    if passes % ranks:
        raise ConfigError(
            f"the samples of {before} ranks cannot be divided among {ranks}: an iteration has {passes} batches in all; "
            f"start a number of ranks that divides {passes}"
        )
    param.iter_size = passes // ranks
    logger.info("%d ranks train for %d: iter_size is %d", ranks, before, param.iter_size)


def first_launch_time() -> float | None:
    """Return the time of the job's first start by `caffepy launch`, in seconds since 1970; None without restarts.

    Raises:
        ConfigError: the environment variable is not a number.
    """
    return _launched_with(SINCE) if SINCE in os.environ else None


def _launched_with(name: str) -> float:
    """Return a number that `caffepy launch` sets in the environment; 0 if unset."""
    try:
        number = float(os.environ.get(name, "0"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is '{os.environ[name]}'; only caffepy launch may set it, to a number; unset it")
    return number
