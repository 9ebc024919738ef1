"""The logger for MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from caffepy.training.callbacks.loggers.contract import Logger, Run

_REQUEST = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Training waits while a request is made; MLflow's own limits add up to many minutes."""
_REFUSED = re.compile(r"[^\w.\-/ ]")
"""Characters that MLflow refuses in names."""


class MlflowLogger(Logger):
    """Logs into a run of the experiment that MLFLOW_EXPERIMENT_NAME names, by default ``caffepy``. No histograms.

    A training that resumes continues its run. MLflow cannot replace values: those of iterations that the run has
    already are not logged again.

    Args:
        uri: of the tracking server, or ``sqlite:///FILE``.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._id = ""
        self._last = -1
        """The run's last iteration."""

    def start(self, run: Run) -> None:
        """Begin or continue a run."""
        for name, value in _REQUEST.items():
            os.environ.setdefault(name, value)
        self._client = MlflowClient(tracking_uri=self._uri)
        name = f"mlflow:{self._uri}"
        known = run.recall(name)
        if known is None or not self._continue(known):
            self._begin(run)
            run.remember(name, self._id)

    def _continue(self, known: str) -> bool:
        try:
            metrics = self._client.get_run(known).data.metrics
        except MlflowException:
            return False  # it was removed
        for name in metrics:
            self._last = max([self._last, *(metric.step for metric in self._client.get_metric_history(known, name))])
        self._id = known
        self._client.update_run(known, status="RUNNING")
        return True

    def _begin(self, run: Run) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "caffepy")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number).info.run_id
        params = [Param(name, str(value)) for name, value in run.settings.items()]
        self._client.log_batch(self._id, params=params)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if iteration <= self._last:
            return
        now = round(1000 * time.time())
        metrics = [Metric(_REFUSED.sub("_", name), value, now, iteration) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, failed: bool) -> None:
        if self._id:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
