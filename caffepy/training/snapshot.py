"""A solver's snapshots: written, restored and checked before training; the same state in memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from caffepy.backend.types import Array
from caffepy.errors import SnapshotError
from caffepy.formats.binary import blob_shape, check_values, same_shape
from caffepy.formats.blobs import format_shape
from caffepy.formats.caffemodel import check_caffemodel_size, read_caffemodel, write_caffemodel
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import DataPosition, SolverParameter, SolverState
from caffepy.formats.snapshot_files import check_snapshot, remove_unfinished, snapshot_paths
from caffepy.formats.solverstate import (
    check_solverstate_size,
    find_learned_net,
    history_arrays,
    read_solverstate,
    write_solverstate,
)
from caffepy.layers.layer import Layer
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor
from caffepy.training.callback import SolverCallback
from caffepy.training.display import LossWindow, RootLog
from caffepy.training.policies import Hyperparameters
from caffepy.training.retention import SnapshotRetention
from caffepy.training.rules import Update
from caffepy.training.schedule import Schedule
from caffepy.utils.options import RetentionPolicy

logger = logging.getLogger(__name__)

TRAIN_NET = -1
"""What `DataPosition.test_net` says of the train net."""


@dataclass(frozen=True)
class SavedSolver:
    """A solver's whole state in host memory: what a snapshot's two files hold.

    Args:
        message: everything but weights and history.
        arrays: the flat parameters, then the history, as the device has them.
    """

    message: SolverState
    arrays: list[np.ndarray]


class SnapshotSolver(Protocol):
    """The parts of a solver that its snapshots hold; `caffepy.training.solver.Solver` has them."""

    param: SolverParameter
    resolve: PathResolver
    callback: SolverCallback
    schedule: Schedule
    log: RootLog
    iteration: int
    net: Net
    test_nets: list[Net]
    tests: list[ForwardExecutor]
    history: list[Array]
    losses: LossWindow
    update: Update
    hyperparameters: Hyperparameters


class Snapshots:
    """The snapshots of one solver.

    Args:
        solver: with its nets and history.
        keep: which snapshots stay when a newer one is written.

    Raises:
        ConfigError: snapshots cannot be written, or would be too large for their format.
    """

    def __init__(self, solver: SnapshotSolver, keep: RetentionPolicy) -> None:
        self._solver = solver
        self.iteration = -1
        """The iteration of the last snapshot."""
        self.restored: SolverState | None = None
        """The state that `restore` read, without history."""
        self.resumed_from: Path | None = None
        """The .solverstate that `restore` read."""
        param, net = solver.param, solver.net
        self.retention = SnapshotRetention(param, solver.resolve, net, solver.test_nets, keep, solver.log)
        if solver.callback.is_root and self.wanted:
            check_snapshot(snapshot_paths(param, solver.resolve, param.max_iter)[1], net.layers)
            remove_unfinished(solver.resolve.output(param.snapshot_prefix))
        if param.snapshot:
            self.check_sizes()

    # -- checks before training ----------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether training writes snapshots without a request."""
        param = self._solver.param
        due = param.snapshot or param.snapshot_after_train or param.test_and_snapshot_last_epochs
        return bool(param.snapshot_prefix and due)

    def check_sizes(self) -> None:
        """Raise ConfigError if a snapshot would be too large for its format."""
        solver, param, net = self._solver, self._solver.param, self._solver.net
        weights, state = snapshot_paths(param, solver.resolve, param.max_iter)
        if solver.callback.is_root and state.suffix != ".h5":
            check_caffemodel_size(weights, net.name, net.layers, param.snapshot_diff)
            shapes = [parameter.blob.shape for parameter in net.parameters.parameters]
            check_solverstate_size(state, shapes * len(solver.history))

    def check_earlier(self) -> None:
        """Warn, before training and behind `restore`, of earlier snapshots with the solver's prefix.

        Raises:
            ConfigError: training would replace or remove one of another net.
        """
        solver, param, last = self._solver, self._solver.param, self._solver.param.max_iter

        def writes(iteration: int) -> bool:
            due = solver.schedule.snapshot_is_due(iteration) or (param.snapshot_after_train and iteration == last)
            return due and solver.iteration < iteration <= last

        if self.wanted and solver.iteration < last:
            self.retention.check_earlier(writes, self.resumed_from)

    # -- files ---------------------------------------------------------------------------------------

    def write(self) -> Path:
        """Write weights and state if this device is the root, remove older ones; every device must call it.

        Returns:
            The .solverstate.

        Raises:
            RunError: it could not be written; the older snapshots are as they were.
        """
        solver, net = self._solver, self._solver.net
        saved = self._state()
        weights, path = snapshot_paths(solver.param, solver.resolve, solver.iteration)
        saved.learned_net = str(weights)
        saved.blob_count = len(solver.history) * len(net.parameters.parameters)
        if solver.callback.is_root:
            kind = "HDF5" if path.suffix == ".h5" else "binary proto"
            solver.log("Snapshotting to %s file %s", kind, weights)
            write_caffemodel(weights, net.name, net.layers, solver.param.snapshot_diff)
            solver.log("Snapshotting solver state to %s file %s", kind, path)
            write_solverstate(path, saved, map(net.backend.to_host, history_views(net, solver.history)))
        self.iteration = solver.iteration
        self.retention.wrote(path)
        return path

    def restore(self, path: Path, strict: bool) -> None:
        """Resume from a .solverstate and the .caffemodel that it names; see `Solver.restore`."""
        solver, net = self._solver, self._solver.net
        solver.log("Restoring previous solver status from %s", path)
        stored = read_solverstate(path, strict)
        saved = stored.message
        check_fits(saved, path, net, len(solver.history), solver.param.type)
        if saved.HasField("learned_net"):
            self._restore_weights(find_learned_net(saved, path), strict)
        else:
            logger.warning("%s names no learned_net: the weights stay as they are, as in Caffe", path)
        for part, values in zip(history_views(net, solver.history), history_arrays(stored, path), strict=True):
            net.backend.from_host(values.reshape(part.shape), part)
        saved.ClearField("history")
        self.adopt(saved)
        self.restored, self.resumed_from = saved, path
        net.parameters.refresh(net.parameters.copies)

    def _restore_weights(self, path: Path, strict: bool) -> None:
        """Copy all parameters of the net from a .caffemodel, or none."""
        net, weights = self._solver.net, read_caffemodel(path, strict)
        stored = {layer.name for layer in weights.message.layer}
        for parameter in net.parameters.parameters:
            if parameter.layer.name not in stored:
                raise SnapshotError(
                    f"{path}: has no layer '{parameter.layer.name}', which the net has; it is of another net"
                )
        net.copy_trained_layers_from(weights, str(path))

    def adopt(self, saved: SolverState) -> None:
        """Resume from a state that another device has `restored`; its weights and history come in `on_start`."""
        self._adopt(saved)
        self.iteration = self._solver.iteration

    # -- memory --------------------------------------------------------------------------------------

    def save_in_memory(self) -> SavedSolver:
        """The whole state; the device must be idle, and every device must call it."""
        solver, net = self._solver, self._solver.net
        flat = (net.parameters.data, *solver.history)
        return SavedSolver(self._state(), [np.array(net.backend.to_host(array)) for array in flat])

    def restore_from_memory(self, saved: SavedSolver) -> None:
        """Take over the state of a solver of the same prototxt."""
        solver, net = self._solver, self._solver.net
        for array, values in zip((net.parameters.data, *solver.history), saved.arrays, strict=True):
            net.backend.from_host(values, array)
        net.parameters.written()
        self._adopt(saved.message)
        net.parameters.refresh(net.parameters.copies)

    # -- the state besides weights and history -------------------------------------------------------

    def _state(self) -> SolverState:
        """Everything but weights, their path and history; every device must call it."""
        solver, param, values = self._solver, self._solver.param, self._solver.hyperparameters
        guard, larc, backend = solver.update.guard, solver.update.larc, solver.net.backend
        saved = SolverState(iter=solver.iteration, current_step=values.current_step)
        if param.lr_policy == "plateau":
            saved.minimum_loss, saved.iter_last_event = values.plateau.minimum_loss, values.plateau.last_event
        if param.lr_policy == "stepearly":
            saved.minimum_loss, saved.iter_last_event = -values.step_early.best, values.step_early.tests
        saved.seed = param.random_seed
        saved.pass_number = solver.net.context.passes.number
        saved.solver_type = param.type
        saved.global_batch = solver.schedule.global_batch
        saved.loss_window.extend(solver.losses.averaged(solver.callback))
        saved.test_pass_number.extend(net.context.passes.number for net in solver.test_nets)
        if guard.adaptive:
            saved.loss_scale = float(backend.to_host(guard.loss_scale))
            saved.good_steps = guard.good_steps
        for iteration, score in sorted(self.retention.scores.items()):
            saved.snapshot_score.add(iter=iteration, name=self.retention.score_name, value=score)
        if param.larc_turbo and larc is not None:
            saved.larc_correlation.extend(backend.to_host(larc.correlation).tolist())
        saved.data_position.extend(data_positions((solver.net, *solver.test_nets)))
        return saved

    def _adopt(self, saved: SolverState) -> None:
        """Take over everything but weights and history."""
        solver, values, update = self._solver, self._solver.hyperparameters, self._solver.update
        name, batch = self.retention.score_name, solver.schedule.global_batch
        update.guard.restore_loss_scale(saved.loss_scale, saved.good_steps)
        if update.larc is not None:
            update.larc.restore(saved.larc_correlation)
        solver.iteration = saved.iter
        values.current_step = saved.current_step
        values.plateau.minimum_loss, values.plateau.last_event = saved.minimum_loss, saved.iter_last_event
        values.step_early.best, values.step_early.tests = -saved.minimum_loss, saved.iter_last_event
        solver.losses.restore(list(saved.loss_window))
        self.retention.scores = {score.iter: score.value for score in saved.snapshot_score if score.name == name}
        self._restore_random(saved)
        restore_positions((solver.net, *solver.test_nets), saved.data_position)
        if saved.HasField("global_batch") and saved.global_batch != batch:
            logger.warning(
                "the snapshot was made with %d samples an iteration and pass, now there are %d",
                saved.global_batch,
                batch,
            )

    def _restore_random(self, saved: SolverState) -> None:
        """Set seed and pass numbers; a snapshot of Caffe's has none, the passes then follow from the iteration."""
        solver, param = self._solver, self._solver.param
        if saved.HasField("seed"):
            if saved.seed != param.random_seed:
                logger.info("random numbers go on from the snapshot's seed %d", saved.seed)
            param.random_seed = saved.seed
        for net in (solver.net, *solver.test_nets):
            net.context.seed = param.random_seed
        for executor in solver.tests:
            executor.drop()  # their graphs draw from the old seed
        has_passes = saved.HasField("pass_number")
        solver.net.context.passes.number = saved.pass_number if has_passes else saved.iter * param.iter_size
        for net, number in zip(solver.test_nets, saved.test_pass_number, strict=False):
            net.context.passes.number = number


def history_views(net: Net, history: Sequence[Array]) -> Iterator[Array]:
    """The history in Caffe's order, each part in its parameter's logical shape."""
    parameters = net.parameters
    for flat in history:
        for parameter in parameters.parameters:
            yield parameters.view(flat, parameter)


def check_fits(saved: SolverState, path: Path, net: Net, histories: int, solver_type: str) -> None:
    """Refuse the state of another solver type or net, before anything is changed.

    Args:
        saved: the state, with its history.
        path: where it was read.
        net: the train net.
        histories: how many values of history the update has for each element of the parameters.
        solver_type: of the solver.

    Raises:
        SnapshotError: it is such a state, or its history is not whole.
    """
    if saved.HasField("solver_type") and saved.solver_type != solver_type:
        raise SnapshotError(
            f"{path}: is the state of a solver of type {saved.solver_type}, this one is {solver_type}; "
            f'set type: "{saved.solver_type}", or start from its weights with --weights'
        )
    parameters = net.parameters.parameters
    expected = histories * len(parameters)
    if len(saved.history) != expected:
        raise SnapshotError(
            f"{path}: holds {len(saved.history)} history blobs, a {solver_type} solver of this net has "
            f"{expected}; it is of another solver type or net"
        )
    for i, blob in enumerate(saved.history):
        check_values(blob, f"{path}: history blob {i}")
        parameter = parameters[i % len(parameters)]
        if not same_shape(blob, parameter.blob.shape):
            raise SnapshotError(
                f"{path}: the history of parameter {parameter.index} of layer '{parameter.layer.name}' has shape "
                f"{format_shape(blob_shape(blob))}, the net's parameter {format_shape(parameter.blob.shape)}; "
                "it is of another net"
            )


def data_positions(nets: Sequence[Net]) -> Iterator[DataPosition]:
    """Where each data layer is in its data: of the train net, then of the test nets."""
    for index, layer, position in _data_layers(nets):
        yield DataPosition(layer=layer.name, position=position, test_net=index)


def restore_positions(nets: Sequence[Net], saved: Iterable[DataPosition]) -> None:
    """Seek in each data layer: to its saved position, or to the first record where the snapshot has none."""
    positions = defaultdict[tuple[int, str], list[int]](list)  # layers of the same name have theirs in turn
    for one in saved:
        positions[one.test_net, one.layer].append(one.position)
    for index, layer, _ in _data_layers(nets):
        own = positions[index, layer.name]
        layer.seek(own.pop(0) if own else 0)


def _data_layers(nets: Sequence[Net]) -> Iterator[tuple[int, Layer, int]]:
    """Layers that have a position in their data: (test net's index or -1, layer, its position)."""
    for index, net in enumerate(nets, TRAIN_NET):
        for layer in net.layers:
            if (position := layer.position()) is not None:
                yield index, layer, position
