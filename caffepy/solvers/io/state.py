"""A solver's snapshots: all that makes a resumed run the same as one never stopped, to and from files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caffepy.blob import format_shape
from caffepy.errors import SnapshotError
from caffepy.net.weights import from_blob_proto, proto_shape, same_shape
from caffepy.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.snapshot.files import (
    find_learned_net,
    read_state,
    read_weights,
    snapshot_names,
    write_state,
    write_weights,
)

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver

log = logging.getLogger(__name__)

TRAIN_NET = -1
"""What `DataPosition.test_net` says of the train net."""


def snapshot_paths(solver: Solver) -> tuple[Path, Path]:
    """The files of a snapshot of this iteration: .caffemodel and .solverstate, or their HDF5 forms."""
    hdf5 = solver.param.snapshot_format == SolverParameter.HDF5
    weights, state = snapshot_names(solver.param.snapshot_prefix, solver.iteration, hdf5)
    return solver.resolve.output(weights), solver.resolve.output(state)


def write_snapshot(solver: Solver) -> Path:
    """Write weights and state if this device is the root; every device must call it. Returns the .solverstate's path.

    Raises:
        RunError: it could not be written; the older snapshots are as they were.
    """
    state = _save_state(solver)
    weights, path = snapshot_paths(solver)
    state.learned_net = str(weights)
    if solver.callback.is_root:
        kind = "HDF5" if path.suffix == ".h5" else "binary proto"
        solver.log("Snapshotting to %s file %s", kind, weights)
        write_weights(weights, solver.net, solver.param.snapshot_diff)
        solver.log("Snapshotting solver state to %s file %s", kind, path)
        write_state(path, state, _history_arrays(solver))
    return path


def _save_state(solver: Solver) -> SolverState:
    """Everything but weights, their path and history."""
    state = SolverState(iter=solver.iteration, current_step=solver.current_step)
    state.seed = solver.param.random_seed
    state.pass_number = solver.net.context.passes.number
    state.solver_type = solver.param.type
    state.global_batch = _global_batch(solver)
    state.loss_window.extend(solver.losses.averaged(solver.callback))
    state.test_pass_number.extend(net.context.passes.number for net in solver.test_nets)
    if solver.updating.adaptive:
        state.loss_scale = float(solver.backend.to_host(solver.updating.loss_scale))
        state.good_steps = solver.updating.good_steps
    for index, layer in _data_layers(solver):
        state.data_position.add(layer=layer.name, position=layer.position(), test_net=index)
    return state


def _history_arrays(solver: Solver) -> Iterator[np.ndarray]:
    """The history in Caffe's order, each part in its parameter's logical shape."""
    parameters = solver.net.parameters
    for flat in solver.history:
        for parameter in parameters.parameters:
            yield solver.backend.to_host(parameters.view(flat, parameter))


def restore_state(solver: Solver, path: Path) -> SolverState:
    """Load weights, history and position from a .solverstate and the .caffemodel that it names.

    Returns the state without its history, for `adopt_state` of the devices that train with this one.

    Raises:
        SnapshotError: a file cannot be read, or is of another solver or net.
    """
    state = read_state(path)
    _check_rule(solver, state, path)
    _check_history(solver, state, path)
    if state.HasField("learned_net"):
        _restore_weights(solver, find_learned_net(state, path))
    _restore_history(solver, state, path)
    state.ClearField("history")
    adopt_state(solver, state)
    return state


def adopt_state(solver: Solver, state: SolverState) -> None:
    """Take over everything but weights and history, which the devices get from the root when training starts."""
    solver.updating.restore_loss_scale(state.loss_scale, state.good_steps)
    solver.iteration = state.iter
    solver.current_step = state.current_step
    solver.losses.restore(list(state.loss_window))
    _restore_random(solver, state)
    _restore_positions(solver, state)


def _global_batch(solver: Solver) -> int:
    return solver.net.batch_size() * solver.shard.world_size


def _check_rule(solver: Solver, state: SolverState, path: Path) -> None:
    if state.HasField("solver_type") and state.solver_type != solver.param.type:
        raise SnapshotError(
            f"{path}: is the state of a solver of type {state.solver_type}, this one is {solver.param.type}; "
            f'set type: "{state.solver_type}", or start from its weights with --weights'
        )


def _check_history(solver: Solver, state: SolverState, path: Path) -> None:
    parameters = solver.net.parameters.parameters
    expected = solver.histories * len(parameters)
    if len(state.history) != expected:
        raise SnapshotError(
            f"{path}: holds {len(state.history)} history blobs, a {solver.param.type} solver of this net has "
            f"{expected}; it is of another solver type or net"
        )
    for i, blob in enumerate(state.history):
        parameter = parameters[i % len(parameters)]
        if not same_shape(blob, parameter.blob.shape):
            raise SnapshotError(
                f"{path}: the history of parameter {parameter.index} of layer '{parameter.layer}' has shape "
                f"{format_shape(proto_shape(blob))}, the net's parameter {format_shape(parameter.blob.shape)}; "
                "it is of another net"
            )


def _restore_weights(solver: Solver, path: Path) -> None:
    copied = solver.net.copy_trained_layers_from(read_weights(path), str(path))
    for parameter in solver.net.parameters.parameters:
        if parameter.layer not in copied:
            raise SnapshotError(f"{path}: has no layer '{parameter.layer}', which the net has; it is of another net")


def _restore_history(solver: Solver, state: SolverState, path: Path) -> None:
    parameters = solver.net.parameters
    count = len(parameters.parameters)
    for i, blob in enumerate(state.history):
        parameter = parameters.parameters[i % count]
        values = from_blob_proto(blob, f"{path}: history blob {i}").reshape(parameter.blob.shape)
        solver.backend.from_host(values, parameters.view(solver.history[i // count], parameter))


def _restore_random(solver: Solver, state: SolverState) -> None:
    """Set seed and pass numbers; a snapshot of Caffe's has none, the passes then follow from the iteration."""
    if state.HasField("seed"):
        if state.seed != solver.param.random_seed:
            log.info("random numbers go on from the snapshot's seed %d", state.seed)
        solver.param.random_seed = state.seed
    for net in (solver.net, *solver.test_nets):
        net.context.seed = solver.param.random_seed
    has_passes = state.HasField("pass_number")
    solver.net.context.passes.number = state.pass_number if has_passes else state.iter * solver.param.iter_size
    for net, number in zip(solver.test_nets, state.test_pass_number, strict=False):
        net.context.passes.number = number


def _restore_positions(solver: Solver, state: SolverState) -> None:
    """Let each data layer go on where it was, or at its first record where the snapshot does not say."""
    positions = {(p.test_net, p.layer): p.position for p in state.data_position}
    for index, layer in _data_layers(solver):
        layer.seek(positions.get((index, layer.name), 0))
    if state.HasField("global_batch") and state.global_batch != _global_batch(solver):
        log.warning(
            "the snapshot was made with %d samples an iteration and pass, now there are %d",
            state.global_batch, _global_batch(solver),
        )  # fmt: skip


def _data_layers(solver: Solver) -> Iterator[tuple[int, Any]]:
    """Layers that have a position in their data: (test net's index or -1, layer)."""
    for index, net in enumerate((solver.net, *solver.test_nets), TRAIN_NET):
        for layer in net.layers:
            if hasattr(layer, "position") and hasattr(layer, "seek"):
                yield index, layer
