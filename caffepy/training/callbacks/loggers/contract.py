"""The contract between a training and its loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.utils.files import atomic_write, read_regular

if TYPE_CHECKING:
    import numpy as np

_MOST_BYTES = 1 << 16
"""Largest file of identifiers that is read."""


@dataclass(frozen=True)
class Run:
    """What a logger is told of the training before its first iteration.

    Args:
        iteration: the first iteration; above 0 if training resumes from a snapshot. Values of this iteration and of
            later ones replace those that an earlier process has logged.
        settings: the net's name, the fields of the solver, the samples of an iteration and the number of devices.
        identifiers: a file beside the snapshots for the identifiers that servers give; None: there is no such folder.
    """

    iteration: int
    settings: Mapping[str, bool | int | float | str]
    identifiers: Path | None = None

    def recall(self, logger: str) -> str | None:
        """The identifier that `remember` stored, if training resumes."""
        identifier = self._stored().get(logger) if self.iteration else None
        return identifier if isinstance(identifier, str) else None

    def remember(self, logger: str, identifier: str) -> None:
        """Store an identifier for a process that resumes this training.

        Raises:
            RunError: the file cannot be written.
        """
        if self.identifiers is not None:
            with atomic_write(self.identifiers) as file:
                file.write(json.dumps({**self._stored(), logger: identifier}, indent=1).encode())

    def _stored(self) -> dict[str, object]:
        if self.identifiers is None:
            return {}
        try:
            stored = json.loads(read_regular(self.identifiers, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return stored if isinstance(stored, dict) else {}


class Logger:
    """Takes the values of a training. The methods do nothing; subclasses override what they need.

    The methods are called on rank 0, in the thread of the first device. An exception in `start` ends a training that
    begins with iteration 0. Other exceptions become a warning, and the logger is not called any more; a
    `caffepy.UserError` in `start` always ends training.
    """

    def start(self, run: Run) -> None:
        """Called before the first iteration."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Called with the values of an iteration, at most once for each iteration and in their order.

        Args:
            iteration: its number, as in the log.
            values: `loss`, `train/OUTPUT`, `test0/OUTPUT`, `learning_rate` and others; may be NaN or infinite.
        """

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """Called with the finite values of parameters and gradients, one float32 array (K,) for each."""

    def close(self, failed: bool) -> None:
        """Called after the last iteration, or when training has `failed`."""
