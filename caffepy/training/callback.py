"""What a program may be told of while a solver trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from caffepy.solvers import Solver


class Callback:
    """A base class of callbacks; an object with one of these methods is a callback without it.

    The methods are called in the thread that trains the first device, on rank 0 alone. One that returns True stops
    training: several devices stop some iterations later, all in the same one. An exception ends training.
    """

    interval: int = 1
    """`after_iteration` is called when this divides the number of iterations made. On a GPU each call waits for it."""

    def after_iteration(self, solver: Solver) -> bool | None:
        """An iteration was made, the one of number `solver.iteration - 1`."""

    def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> bool | None:
        """The test nets were scored: the mean of each output by its name, for each of the nets."""

    def after_snapshot(self, solver: Solver, path: Path) -> bool | None:
        """A snapshot was written; `path` is the .solverstate."""


@runtime_checkable
class IterationCallback(Protocol):
    """A function that is called after each iteration."""

    def __call__(self, solver: Solver) -> bool | None:
        """As `Callback.after_iteration`."""
