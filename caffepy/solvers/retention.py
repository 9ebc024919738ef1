"""Older snapshots with the solver's prefix: removed, as `caffepy train --keep-last` and `--keep-best` want it, and not
replaced by those of another net.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from caffepy.config.paths import PathResolver
from caffepy.errors import ConfigError, SnapshotError
from caffepy.net import Net
from caffepy.options import RetentionPolicy
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.snapshot.caffemodel import first_difference, read_layer_shapes
from caffepy.snapshot.files import (
    describe_snapshot,
    iteration_of,
    remove_snapshot,
    snapshots,
    stored_weights,
    weights_beside,
)
from caffepy.solvers.display import RootLog
from caffepy.solvers.score import TestScore
from caffepy.solvers.state import snapshot_paths

log = logging.getLogger(__name__)


class SnapshotRetention:
    """Removes snapshots with the solver's prefix, after a newer one was written whole; every device may call it.

    Args:
        param: the solver.
        resolve: finds the files that the solver names.
        net: the train net.
        test_nets: in Caffe's order.
        keep: what stays.
        log: for lines that only the root shows; the root alone removes.

    Raises:
        ConfigError: no test net has the score.
    """

    def __init__(
        self,
        param: SolverParameter,
        resolve: PathResolver,
        net: Net,
        test_nets: list[Net],
        keep: RetentionPolicy,
        log: RootLog,
    ) -> None:
        self.scores: dict[int, float] = {}
        """Of snapshots in the tests that followed them, by iteration."""
        self._param = param
        self._resolve = resolve
        self._net = net
        self._keep = keep
        self._log = log
        self._written: Path | None = None
        """The newest snapshot of this run."""
        self._score = None
        if keep.keep_best:
            self._score = TestScore("--keep-best", keep.keep_best, test_nets, param.test_interval)

    def check_earlier(self, writes: Callable[[int], bool], resumed: Path | None) -> None:
        """Look, before training, at the snapshots with the solver's prefix that are there already.

        A warning names the newest one, unless training goes on from one of them. Weights that would be replaced or
        removed must be of the same net; unreadable files are passed over with a warning.

        Args:
            writes: whether training will write a snapshot of an iteration.
            resumed: the .solverstate from which training goes on; None: it begins anew.

        Raises:
            ConfigError: a file of another net would be replaced or removed.
        """
        prefix = self._resolve.output(self._param.snapshot_prefix)
        earlier = snapshots(prefix)
        if earlier and (resumed is None or resumed.resolve() not in [path.resolve() for path in earlier]):
            log.warning(
                "%s is the newest of the snapshots that have the prefix %s already; this training does not go on from "
                "it (--snapshot auto takes the newest whole one) and replaces those of the same iterations",
                earlier[0], prefix,
            )  # fmt: skip
        removed = [weights_beside(path) for path in earlier] if self._keep.keep_last or self._keep.keep_best else []
        for path in stored_weights(prefix):
            iteration = iteration_of(path)
            replaced = writes(iteration) and path == snapshot_paths(self._param, self._resolve, iteration)[0]
            if not replaced and path not in removed:
                continue
            try:
                difference = first_difference(self._net.layers, read_layer_shapes(path).layer)
            except SnapshotError as error:
                log.warning("%s; training will replace it", error)
                continue
            if difference:
                raise ConfigError(
                    f"snapshot_prefix: {path} is of another net ({difference}) and would be "
                    f"{'replaced' if replaced else 'removed'}: set snapshot_prefix to another one, or give --overwrite"
                )

    @property
    def score_name(self) -> str:
        """What is scored, as `RetentionPolicy.keep_best` names it; empty: nothing."""
        return self._keep.keep_best

    def note_scores(self, iteration: int, scores: list[dict[str, np.ndarray]]) -> None:
        """Remember the score of an iteration's snapshot, which was written before its test."""
        value = None if self._score is None else self._score.value(scores)
        if value is not None:
            self.scores[iteration] = value
            self._tidy()

    def wrote(self, path: Path) -> None:
        """Remember the newest snapshot, and remove snapshots that need not stay."""
        self._written = path
        self._tidy()

    def _tidy(self) -> None:
        keep = self._keep
        if self._written is None or not self._log.is_root or not (keep.keep_last or keep.keep_best):
            return
        prefix = self._resolve.output(self._param.snapshot_prefix)
        found = [path for path in snapshots(prefix) if path.name != self._written.name]
        staying = {*found[: max(keep.keep_last, 1) - 1], self._best([self._written, *found])}
        doomed = [path for path in found if path not in staying]
        if not doomed or not self._is_whole(self._written):
            return
        for path in doomed:
            try:
                remove_snapshot(path)
                self.scores.pop(iteration_of(path), None)
                self._log("Removed snapshot %s", path)
            except OSError as error:
                log.warning("%s: cannot be removed: %s", path, error.strerror)

    def _best(self, found: list[Path]) -> Path | None:
        """The snapshot that tested best, of equals the oldest; None if none was tested."""
        sign = 1.0 if self._score is None else self._score.sign
        scores = {path: self.scores.get(iteration_of(path), math.nan) * sign for path in reversed(found)}
        tested = {path: score for path, score in scores.items() if not math.isnan(score)}
        return max(tested, key=lambda path: tested[path]) if tested else None

    def _is_whole(self, path: Path) -> bool:
        """Whether a snapshot can be read back; older ones stay where it cannot."""
        try:
            for part in (path, weights_beside(path)):
                describe_snapshot(part)
        except SnapshotError as error:
            log.warning("older snapshots are kept, because the newest cannot be read back: %s", error)
            return False
        return True
