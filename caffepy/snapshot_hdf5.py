"""The HDF5 form of snapshots, as Caffe lays it out; the only user of h5py for snapshots.

Weights: `/data/<layer>/<index>` (and `/diff`), each parameter under its owner. State: `/iter`, `/learned_net`,
`/current_step`, `/history/<i>`; `/caffepy`, which Caffe passes over, holds the fields of our own as
a serialised SolverState.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from caffepy.errors import SnapshotError
from caffepy.net.weights import to_blob_proto
from caffepy.proto.caffe_pb2 import NetParameter, SolverState

if TYPE_CHECKING:
    from caffepy.net import Net

_CAFFES_FIELDS = ("iter", "learned_net", "current_step", "history")


@contextmanager
def _create(path: Path) -> Iterator[Any]:
    """An HDF5 file to fill, made in memory and then written: the library itself does not get over a full disk."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        yield file
    with open(path, "wb") as target:
        target.write(buffer.getbuffer())


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:
        raise SnapshotError(f"{path}: cannot be read as HDF5: {error}; it may be truncated") from error


def write_weights_hdf5(path: Path, net: Net, write_diff: bool) -> None:
    """Write a net's parameters."""
    with _create(path) as file:
        data = file.create_group("data")
        diff = file.create_group("diff") if write_diff else None
        for layer in net.layers:
            values = data.require_group(layer.name)
            gradients = diff.require_group(layer.name) if diff is not None else None
            for index, blob in enumerate(layer.blobs):
                if net.owns(layer, index):
                    values.create_dataset(str(index), data=blob.host_data())
                if gradients is not None:
                    gradients.create_dataset(str(index), data=blob.host_diff())


def read_weights_hdf5(path: Path) -> NetParameter:
    """The layers in a .caffemodel.h5, those that hold parameters."""
    result = NetParameter()
    with _open(path) as file:
        if "data" not in file:
            what = "a .solverstate.h5; resume from it with --snapshot" if "iter" in file else "something else"
            raise SnapshotError(f"{path}: is no .caffemodel.h5 but {what}")
        for name, group in _layer_groups(file["data"], ""):
            layer = result.layer.add(name=name)
            for index in range(len(group)):
                if str(index) not in group:
                    raise SnapshotError(f"{path}: layer '{name}' has no parameter {index}; the file is damaged")
                layer.blobs.append(to_blob_proto(np.asarray(group[str(index)], np.float32)))
    return result


def _layer_groups(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Groups that hold datasets, with their path as the layer's name (names such as `inception_3a/1x1` are paths)."""
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            if any(isinstance(child, h5py.Dataset) for child in item.values()):
                yield prefix + name, item
            yield from _layer_groups(item, f"{prefix}{name}/")


def write_state_hdf5(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history."""
    own = SolverState()
    own.CopyFrom(state)
    for field in _CAFFES_FIELDS:
        own.ClearField(field)
    with _create(path) as file:
        file["iter"] = np.array([state.iter], np.int32)
        file["learned_net"] = np.bytes_(state.learned_net)
        file["current_step"] = np.array([state.current_step], np.int32)
        file["caffepy"] = np.frombuffer(own.SerializeToString(), np.uint8)
        group = file.create_group("history")
        for index, values in enumerate(history):
            group.create_dataset(str(index), data=values)


def read_state_hdf5(path: Path) -> SolverState:
    """The state in a .solverstate.h5."""
    with _open(path) as file:
        if "iter" not in file or "history" not in file:
            what = "a .caffemodel.h5; load it with --weights" if "data" in file else "something else"
            raise SnapshotError(f"{path}: is no .solverstate.h5 but {what}")
        state = SolverState()
        if "caffepy" in file:
            state.MergeFromString(np.asarray(file["caffepy"]).tobytes())
        state.iter = int(np.ravel(file["iter"])[0])
        if "learned_net" in file:
            state.learned_net = bytes(file["learned_net"][()]).decode()
        state.current_step = int(np.ravel(file["current_step"])[0]) if "current_step" in file else 0
        for index in range(len(file["history"])):
            state.history.append(to_blob_proto(np.asarray(file["history"][str(index)], np.float32)))
    return state
