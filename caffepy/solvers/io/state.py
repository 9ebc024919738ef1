"""A solver's state as a message: all that makes a resumed run the same as one never stopped."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from caffepy.backend.types import Array
from caffepy.blob import format_shape
from caffepy.errors import SnapshotError
from caffepy.layers.core.base import Layer
from caffepy.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.snapshot.binary import blob_shape, check_values, same_shape
from caffepy.snapshot.caffemodel import write_caffemodel
from caffepy.snapshot.files import snapshot_names
from caffepy.snapshot.solverstate import write_solverstate
from caffepy.solvers.train_state import TrainState

log = logging.getLogger(__name__)

TRAIN_NET = -1
"""What `DataPosition.test_net` says of the train net."""


def snapshot_paths(state: TrainState, iteration: int) -> tuple[Path, Path]:
    """The files of an iteration's snapshot: .caffemodel and .solverstate, or their HDF5 forms."""
    hdf5 = state.param.snapshot_format == SolverParameter.HDF5
    weights, solver_state = snapshot_names(state.param.snapshot_prefix, iteration, hdf5)
    return state.resolve.output(weights), state.resolve.output(solver_state)


def write_snapshot(state: TrainState) -> Path:
    """Write weights and state if this device is the root; every device must call it. Returns the .solverstate's path.

    Raises:
        RunError: it could not be written; the older snapshots are as they were.
    """
    saved = save_state(state)
    weights, path = snapshot_paths(state, state.iteration)
    saved.learned_net = str(weights)
    saved.blob_count = len(state.history) * len(state.net.parameters.parameters)
    if state.callback.is_root:
        kind = "HDF5" if path.suffix == ".h5" else "binary proto"
        state.log("Snapshotting to %s file %s", kind, weights)
        write_caffemodel(weights, state.net.name, state.net.layers, state.param.snapshot_diff)
        state.log("Snapshotting solver state to %s file %s", kind, path)
        write_solverstate(path, saved, map(state.backend.to_host, history_views(state)))
    return path


def save_state(state: TrainState) -> SolverState:
    """Everything but weights, their path and history."""
    saved = SolverState(iter=state.iteration, current_step=state.current_step)
    if state.param.lr_policy == "plateau":
        saved.minimum_loss, saved.iter_last_event = state.plateau.minimum_loss, state.plateau.last_event
    saved.seed = state.param.random_seed
    saved.pass_number = state.net.context.passes.number
    saved.solver_type = state.param.type
    saved.global_batch = _global_batch(state)
    saved.loss_window.extend(state.losses.averaged(state.callback))
    saved.test_pass_number.extend(net.context.passes.number for net in state.test_nets)
    if state.update.adaptive:
        saved.loss_scale = float(state.backend.to_host(state.update.loss_scale))
        saved.good_steps = state.update.good_steps
    for iteration, score in sorted(state.scores.items()):
        saved.snapshot_score.add(iter=iteration, name=state.score_name, value=score)
    if state.param.larc_turbo and state.update.larc is not None:
        saved.larc_correlation.extend(state.backend.to_host(state.update.larc.correlation).tolist())
    for index, layer, position in _data_layers(state):
        saved.data_position.add(layer=layer.name, position=position, test_net=index)
    return saved


def history_views(state: TrainState) -> Iterator[Array]:
    """The history in Caffe's order, each part in its parameter's logical shape."""
    parameters = state.net.parameters
    for flat in state.history:
        for parameter in parameters.parameters:
            yield parameters.view(flat, parameter)


def adopt_state(state: TrainState, saved: SolverState) -> None:
    """Take over everything but weights and history, which the devices get from the root when training starts."""
    state.update.restore_loss_scale(saved.loss_scale, saved.good_steps)
    if state.update.larc is not None:
        state.update.larc.restore(saved.larc_correlation)
    state.iteration = saved.iter
    state.current_step = saved.current_step
    state.plateau.minimum_loss, state.plateau.last_event = saved.minimum_loss, saved.iter_last_event
    state.losses.restore(list(saved.loss_window))
    state.scores = {score.iter: score.value for score in saved.snapshot_score if score.name == state.score_name}
    _restore_random(state, saved)
    _restore_positions(state, saved)


def _global_batch(state: TrainState) -> int:
    return state.net.batch_size() * state.net.context.shard.world_size


def check_fits(state: TrainState, saved: SolverState, path: Path) -> None:
    """Refuse the state of another solver type or net, before anything is changed.

    Raises:
        SnapshotError: it is such a state, or its history is not whole.
    """
    if saved.HasField("solver_type") and saved.solver_type != state.param.type:
        raise SnapshotError(
            f"{path}: is the state of a solver of type {saved.solver_type}, this one is {state.param.type}; "
            f'set type: "{saved.solver_type}", or start from its weights with --weights'
        )
    parameters = state.net.parameters.parameters
    expected = len(state.history) * len(parameters)
    if len(saved.history) != expected:
        raise SnapshotError(
            f"{path}: holds {len(saved.history)} history blobs, a {state.param.type} solver of this net has "
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


def _restore_random(state: TrainState, saved: SolverState) -> None:
    """Set seed and pass numbers; a snapshot of Caffe's has none, the passes then follow from the iteration."""
    if saved.HasField("seed"):
        if saved.seed != state.param.random_seed:
            log.info("random numbers go on from the snapshot's seed %d", saved.seed)
        state.param.random_seed = saved.seed
    for net in (state.net, *state.test_nets):
        net.context.seed = state.param.random_seed
    for runner in state.tests:
        runner.drop()  # their graphs draw from the old seed
    has_passes = saved.HasField("pass_number")
    state.net.context.passes.number = saved.pass_number if has_passes else saved.iter * state.param.iter_size
    for net, number in zip(state.test_nets, saved.test_pass_number, strict=False):
        net.context.passes.number = number


def _restore_positions(state: TrainState, saved: SolverState) -> None:
    """Seek in each data layer: to its saved position, or to the first record where the snapshot has none."""
    positions = defaultdict[tuple[int, str], list[int]](list)  # layers of the same name have theirs in turn
    for saved_position in saved.data_position:
        positions[saved_position.test_net, saved_position.layer].append(saved_position.position)
    for index, layer, _ in _data_layers(state):
        own = positions[index, layer.name]
        layer.seek(own.pop(0) if own else 0)
    if saved.HasField("global_batch") and saved.global_batch != _global_batch(state):
        log.warning(
            "the snapshot was made with %d samples an iteration and pass, now there are %d",
            saved.global_batch, _global_batch(state),
        )  # fmt: skip


def _data_layers(state: TrainState) -> Iterator[tuple[int, Layer, int]]:
    """Layers that have a position in their data: (test net's index or -1, layer, its position)."""
    for index, net in enumerate((state.net, *state.test_nets), TRAIN_NET):
        for layer in net.layers:
            if (position := layer.position()) is not None:
                yield index, layer, position
