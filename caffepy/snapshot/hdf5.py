"""The HDF5 form of snapshots, as Caffe lays it out; the only user of h5py for snapshots.

Weights: `/data/<layer>/<index>` (and `/diff`), each parameter under its owner (Caffe's `net.cpp`, ToHDF5). A layer's
name is its path, so that the group of `conv1/bn` lies in that of `conv1`. State: `/iter`, `/learned_net`,
`/current_step`, `/history/<i>`; `/caffepy`, which Caffe passes over, holds the fields of our own as a serialised
SolverState.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import h5py
import numpy as np

from caffepy.errors import RunError, SnapshotError
from caffepy.net.weights import to_blob_proto
from caffepy.proto.caffe_pb2 import BlobProto, NetParameter, SolverState

if TYPE_CHECKING:
    from caffepy.net import Net

_CAFFES_FIELDS = ("iter", "learned_net", "current_step", "history")

_QUOTED = "caffepy_quoted"
"""Attribute of the group of a layer whose name is no path that HDF5 would keep; see `_layer_paths`."""


MOST_PARAMETERS = 1000
"""Exclusive upper bound of a parameter's index."""


@contextmanager
def _create(path: Path) -> Iterator[Any]:
    """An HDF5 file built in memory and then written, because h5py does not survive a full disk."""
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
    """Write a net's parameters.

    Raises:
        RunError: two layers that have parameters have one name.
    """
    paths = _layer_paths(net)
    with _create(path) as file:
        data = file.create_group("data")
        diff = file.create_group("diff") if write_diff else None
        for layer in net.layers:
            values = _layer_group(data, paths[layer.name])
            gradients = _layer_group(diff, paths[layer.name]) if diff is not None else None
            for index, blob in enumerate(layer.blobs):
                if net.owns(layer, index):
                    values.create_dataset(str(index), data=blob.host_data())
                if gradients is not None:
                    gradients.create_dataset(str(index), data=blob.host_diff())


def _layer_paths(net: Net) -> dict[str, str]:
    """The path of each layer's group, by layer name: the name itself where that is unambiguous in HDF5.

    Quoted otherwise: `a//b`, `a/` and `.` would be other paths, `/a` would begin at the file's root, and `a/0` is
    the path of the first parameter of a layer `a`.
    """
    learned = [layer.name for layer in net.layers if layer.blobs]
    for name in learned:
        if learned.count(name) > 1:
            raise RunError(
                f"two layers of the name '{name}' have parameters, which HDF5 cannot hold; rename one of them, or set "
                "snapshot_format: BINARYPROTO"
            )
    parameter_paths = {f"{layer.name}/{index}" for layer in net.layers for index in range(len(layer.blobs))}
    return {
        layer.name: layer.name if _is_path(layer.name, parameter_paths) else _quoted(layer.name) for layer in net.layers
    }


def _is_path(name: str, parameter_paths: set[str]) -> bool:
    """Whether a layer's name can be its path: HDF5 does not normalise it, and no prefix is a parameter."""
    parts = name.split("/")
    prefixes = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    plain = "\0" not in name and not name.startswith("%") and not any(part in ("", ".") for part in parts)
    return plain and not any(prefix in parameter_paths for prefix in prefixes)


def _quoted(name: str) -> str:
    """A name without slashes that is no other layer's: those that begin with % are always quoted."""
    return "%" + quote(name, safe="")


def _layer_group(parent: Any, path: str) -> Any:
    group = parent.require_group(path)
    if path.startswith("%"):
        group.attrs[_QUOTED] = 1
    return group


def read_weights_hdf5(path: Path) -> NetParameter:
    """The layers in a .caffemodel.h5, those that hold parameters.

    A parameter that only another layer holds, with which it is shared, is an empty blob.
    """
    result = NetParameter()
    with _open(path) as file:
        if "data" not in file:
            what = "a .solverstate.h5; resume from it with --snapshot" if "iter" in file else "something else"
            raise SnapshotError(f"{path}: is no .caffemodel.h5 but {what}")
        for name, group in _layer_groups(file["data"], ""):
            layer = result.layer.add(name=name)
            for key in sorted(_datasets(group), key=lambda key: (len(key), key)):
                if not _is_index(key):
                    raise SnapshotError(f"{path}: layer '{name}' has a dataset '{key}', which is no parameter's number")
                layer.blobs.extend(BlobProto() for _ in range(len(layer.blobs), int(key)))
                layer.blobs.append(to_blob_proto(np.asarray(group[key], np.float32)))
    return result


def _is_index(key: str) -> bool:
    return key.isdecimal() and key == str(int(key)) and int(key) < MOST_PARAMETERS


def _datasets(group: Any) -> list[str]:
    """The names of the datasets in a group: groups beside them are other layers'."""
    return [key for key, item in group.items() if isinstance(item, h5py.Dataset)]


def _layer_groups(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Groups that hold datasets, with their path as the layer's name (names such as `inception_3a/1x1` are paths)."""
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            if _datasets(item):
                yield unquote(name[1:]) if _QUOTED in item.attrs else prefix + name, item
            yield from _layer_groups(item, f"{prefix}{name}/")


def write_state_hdf5(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history."""
    own = SolverState()
    own.CopyFrom(state)
    for field in _CAFFES_FIELDS:
        own.ClearField(field)
    with _create(path) as file:
        file["iter"] = np.array([state.iter], np.int32)
        _write_string(file, "learned_net", state.learned_net)
        file["current_step"] = np.array([state.current_step], np.int32)
        file["caffepy"] = np.frombuffer(own.SerializeToString(), np.uint8)
        group = file.create_group("history")
        for index, values in enumerate(history):
            group.create_dataset(str(index), data=values)


def _write_string(file: Any, name: str, value: str) -> None:
    """A scalar string of fixed length whose terminating NUL is part of it, as H5LTmake_dataset_string writes it.

    Caffe reads as many bytes as the type has and looks for the NUL in them (`util/hdf5.cpp`, hdf5_load_string).
    """
    content = value.encode()
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(content) + 1)
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_obj_track_times(False)  # the same snapshot gives the same bytes
    stored = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR), settings)
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(content, f"S{len(content) + 1}"), kind)


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
