"""What `caffepy.train` returns: a trained solver, and what training has shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from caffepy.net import Net
from caffepy.net.describe import table
from caffepy.snapshot.caffemodel import write_caffemodel
from caffepy.solvers import Solver


class Record:
    """A callback that keeps scores, snapshots and those losses that were read."""

    waits = False

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.scores: dict[int, list[dict[str, np.ndarray]]] = {}
        self.snapshots: list[Path] = []
        self._seen = 0

    def after_iteration(self, solver: Solver) -> None:
        if solver.losses.added != self._seen:
            self._seen = solver.losses.added
            self.losses[solver.iteration - 1] = solver.losses.values()[-1]

    def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> None:
        self.scores[solver.iteration] = scores

    def after_snapshot(self, solver: Solver, path: Path) -> None:
        self.snapshots.append(path)


class TrainResult:
    """A training that has ended.

    Args:
        make: makes the solver, with the state in which training ended.
        record: what was noted meanwhile.
        iteration: how many iterations were made.
        stopped_early: whether training was stopped before max_iter.
    """

    def __init__(self, make: Callable[[], Solver], record: Record, iteration: int, stopped_early: bool) -> None:
        self._make = make
        self._solver: Solver | None = None
        self.iteration = iteration
        self.stopped_early = stopped_early
        self.losses = record.losses
        """The first device's loss by iteration: of each on a CPU, of those that were shown or checked on a GPU."""
        self.scores = record.scores
        """By the number of iterations made before the test: for each test net the mean of each of its outputs."""
        self.snapshots = record.snapshots
        """The .solverstate files that were written, the oldest first."""

    @property
    def solver(self) -> Solver:
        """The trained solver, alone on the first device, ready to go on with `step`, `test_all` or `snapshot`."""
        if self._solver is None:
            self._solver = self._make()
        return self._solver

    @property
    def net(self) -> Net:
        """The trained net, of the TRAIN phase."""
        return self.solver.net

    @property
    def test_nets(self) -> list[Net]:
        """The nets of the TEST phase, which use the same parameters."""
        return self.solver.test_nets

    def save(self, path: str | Path) -> None:
        """Write the weights as a .caffemodel, or as HDF5 where the name ends with .h5.

        Raises:
            RunError: it could not be written.
        """
        with self.solver.backend.activate():
            write_caffemodel(Path(path), self.net.name, self.net.layers)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        if self._solver is not None:
            with self._solver.backend.activate():
                self._solver.close()
            self._solver.backend.close()

    def __enter__(self) -> TrainResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [f"{self.iteration} iterations" + (", stopped early" if self.stopped_early else "")]
        parts += [f"loss {list(self.losses.values())[-1]:.6g}"] if self.losses else []
        if self.scores:
            parts.append(", ".join(f"{name} {value}" for name, value in _flat(list(self.scores.values())[-1])))
        return f"<caffepy training: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        rows = [(iteration, name, value) for iteration, scores in self.scores.items() for name, value in _flat(scores)]
        scores = table(("iteration", "output", "score"), rows) if rows else ""
        return scores + self.solver._repr_html_()


def _flat(scores: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Outputs and their values as text; those of several test nets with the net's number."""
    several = len(scores) > 1
    return [
        (f"#{index} {name}" if several else name, ", ".join(f"{number:.6g}" for number in np.ravel(value)))
        for index, net in enumerate(scores)
        for name, value in net.items()
    ]
