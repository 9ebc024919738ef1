"""The exponential moving average of the parameters (`--ema`): a callback on every device.

    average += (1 - decay_t) (parameters - average),    decay_t = min(decay, (1 + t) / (10 + t)) after iteration t

The smaller decay of the first iterations forgets the initial values, as in TensorFlow's ExponentialMovingAverage.
Tests score the averaged parameters. Each snapshot is followed by ``PREFIX_iter_N.ema.caffemodel`` with them.

All devices compute the same average from their equal parameters. Running statistics, which differ between devices, are
averaged over the devices before they are tested or saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caffepy.backend import Each, Scalar, expression
from caffepy.formats.caffemodel import read_caffemodel, write_caffemodel
from caffepy.formats.snapshot_files import averaged_weights_beside

if TYPE_CHECKING:
    from caffepy.training.solver import Solver

log = logging.getLogger(__name__)


@expression
def moved_towards(average: Each, value: Each, share: Scalar) -> Each:
    return average + share * (value - average)


@expression
def swapped(first: Each, second: Each) -> tuple[Each, Each]:
    return second, first


class WeightAverage:
    """Averages the parameters after each iteration, and replaces them by the average during tests.

    Args:
        solver: before its first iteration, with its snapshot or weights restored on the root.
        decay: of the average, above 0 and below 1.

    Raises:
        OutOfMemoryError: there is no memory for the average.
        SnapshotError: the average beside the restored snapshot cannot be read.
    """

    waits = False

    def __init__(self, solver: Solver, decay: float) -> None:
        self._solver = solver
        self._decay = decay
        self._gathered_at = -1
        """The iteration after which the statistics of all devices were averaged last."""
        parameters, backend = solver.net.parameters, solver.backend
        self._average = parameters.new_history()
        backend.copy(parameters.data, self._average)
        solver.replicated.append(self._average)
        # On a GPU the first calls compile, which must not happen while other devices wait in an all-reduce.
        backend.apply(moved_towards, (self._average, parameters.data, 0.0), (self._average,))
        self._swap()
        self._swap()
        if solver.snapshots.resumed_from is not None:
            self._restore(averaged_weights_beside(solver.snapshots.resumed_from))

    def _restore(self, path: Path) -> None:
        solver = self._solver
        if not path.exists():
            log.warning("%s does not exist: the average of the parameters begins with the snapshot's weights", path)
            return
        solver.net.copy_trained_layers_from(read_caffemodel(path), str(path))
        self._swap()
        solver.log("Restored the average of the parameters from %s", path)

    # -- the solver's events -------------------------------------------------------------------------

    def after_iteration(self, solver: Solver) -> None:
        made = solver.iteration - 1
        share = 1.0 - min(self._decay, (1 + made) / (10 + made))
        solver.backend.apply(moved_towards, (self._average, solver.net.parameters.data, share), (self._average,))

    def before_test(self, solver: Solver) -> None:
        self._gather_statistics()
        self._swap()

    def after_test(self, solver: Solver, scores: Sequence[dict[str, np.ndarray]]) -> None:
        self._swap()

    def after_snapshot(self, solver: Solver, path: Path) -> None:
        self._gather_statistics()
        if not solver.callback.is_root:
            return
        path = averaged_weights_beside(path)
        solver.log("Snapshotting the average of the parameters to %s", path)
        with self._applied():
            write_caffemodel(path, solver.net.name, solver.net.layers)

    # -- the parameters ------------------------------------------------------------------------------

    def _swap(self) -> None:
        """Exchange the parameters and the average in their memory, which graphs and test nets read."""
        parameters = self._solver.net.parameters
        data = parameters.data
        parameters.backend.apply(swapped, (data, self._average), (data, self._average))
        parameters.written()
        parameters.refresh(parameters.copies)

    @contextmanager
    def _applied(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _gather_statistics(self) -> None:
        """Make the average's running statistics those of all devices; at most once an iteration."""
        solver = self._solver
        if solver.callback.world_size == 1 or self._gathered_at == solver.iteration:
            return
        self._gathered_at = solver.iteration
        blobs = [layer.blobs[index] for layer in solver.net.layers for index in layer.local_statistics()]
        if parts := solver.net.parameters.slices(blobs):
            solver.callback.average_over_devices([self._average[part] for part in parts])
