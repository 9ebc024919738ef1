"""Older snapshots with the solver's prefix: removed by `--keep-last` and `--keep-best`, by the score that is named.

A score is an output of a test net, or its loss. Snapshots of another net are not replaced. `--early-stop` uses the
score too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from caffepy.errors import ConfigError, SnapshotError
from caffepy.formats.caffemodel import read_layer_shapes
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.formats.snapshot_files import (
    describe_snapshot,
    iteration_of,
    remove_snapshot,
    snapshot_paths,
    snapshots,
    stored_weights,
    weights_beside,
)
from caffepy.net import Net
from caffepy.net.trained_layers import first_difference
from caffepy.training.display import RootLog
from caffepy.utils.options import RetentionPolicy
from caffepy.utils.registry import suggest

log = logging.getLogger(__name__)


LOSS = "loss"
"""The score that stands for the sum of a test net's losses, where no output has this name."""


class TestScore:
    """One number from the results of a test.

    Smaller is better for the tops of loss layers and for `loss`, larger for all others.

    Args:
        option: that names the score, for messages.
        name: an output of a test net, or `loss`.
        test_nets: in Caffe's order; the first that has the score counts.
        test_interval: the solver's; 0: there are no tests.

    Raises:
        ConfigError: there are no tests, or no test net has the score.
    """

    __test__ = False  # keeps pytest from collecting this class

    def __init__(self, option: str, name: str, test_nets: Sequence[Net], test_interval: int) -> None:
        if not test_nets or not test_interval:
            raise ConfigError(f"{option} {name} needs tests: set test_iter and test_interval in the solver")
        having = [index for index, net in enumerate(test_nets) if name in net.outputs]
        losing = [index for index, net in enumerate(test_nets) if name == LOSS and _loss_weights(net)]
        if not having and not losing:
            known = [output for net in test_nets for output in net.outputs]
            raise ConfigError(f"{option} {name}: no test net has such an output; {suggest(name, known)}")
        self.name = name
        self._index = (having or losing)[0]
        self._weights = _loss_weights(test_nets[self._index])
        smaller = not having or name in self._weights
        self.sign = -1.0 if smaller else 1.0
        """Multiplied by a score it makes larger numbers the better ones."""

    def value(self, scores: Sequence[Mapping[str, np.ndarray]]) -> float | None:
        """Return the score in a test's results; None if the test ended before its net."""
        if self._index >= len(scores):
            return None
        found = scores[self._index]
        if self.name in found:
            return float(found[self.name].mean())
        return sum(weight * float(found[name].sum()) for name, weight in self._weights.items())


def _loss_weights(net: Net) -> dict[str, float]:
    """Return the outputs of a net that are losses, with their weights."""
    weights = {name: float(net.loss_weight(blob)) for name, blob in net.outputs.items()}
    return {name: weight for name, weight in weights.items() if weight}


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
                earlier[0],
                prefix,
            )
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
