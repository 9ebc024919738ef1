"""The logger for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import wandb

from caffepy.training.callbacks.loggers.contract import Logger, Run


class WandbLogger(Logger):
    """Logs into a run of a project; wandb's environment variables (WANDB_MODE, WANDB_RUN_ID, ...) act.

    A training that resumes continues its run. The server keeps the values of iterations that it has already.

    Args:
        project: ``PROJECT`` or ``ENTITY/PROJECT``.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None

    def start(self, run: Run) -> None:
        """Begin or continue a run."""
        entity, _, project = self._project.rpartition("/")
        name = f"wandb:{self._project}"
        known = run.recall(name)
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            config=dict(run.settings),
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
        )
        run.remember(name, self._run.id)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._log(iteration, dict(values))

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        self._log(iteration, {name: wandb.Histogram(array) for name, array in values.items()})

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

    def _log(self, iteration: int, values: dict[str, Any]) -> None:
        if iteration >= self._run.step:
            self._run.log(values, step=iteration)
