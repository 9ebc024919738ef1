"""The parts of a solver's snapshots: names of files, history, positions in the data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caffepy.backend.types import Array
from caffepy.errors import SnapshotError
from caffepy.formats.binary import blob_shape, check_values, same_shape
from caffepy.formats.blobs import format_shape
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import DataPosition, SolverParameter, SolverState
from caffepy.formats.snapshot_files import snapshot_names
from caffepy.layers.layer import Layer
from caffepy.net import Net

TRAIN_NET = -1
"""What `DataPosition.test_net` says of the train net."""


def snapshot_paths(param: SolverParameter, resolve: PathResolver, iteration: int) -> tuple[Path, Path]:
    """The files of an iteration's snapshot: .caffemodel and .solverstate, or their HDF5 forms."""
    hdf5 = param.snapshot_format == SolverParameter.HDF5
    weights, solver_state = snapshot_names(param.snapshot_prefix, iteration, hdf5)
    return resolve.output(weights), resolve.output(solver_state)


@dataclass(frozen=True)
class SavedSolver:
    """A solver's whole state in host memory: what a snapshot's two files hold.

    Args:
        message: everything but weights and history.
        arrays: the flat parameters, then the history, as the device has them.
    """

    message: SolverState
    arrays: list[np.ndarray]


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
