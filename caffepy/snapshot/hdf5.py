"""The HDF5 form of snapshots, as Caffe lays it out. h5py writes, `caffepy.hdf5` reads.

Weights: `/data/<layer>/<index>` (and `/diff`), each parameter under its owner (Caffe's `net.cpp`, ToHDF5). A layer's
name is its path, so that the group of `conv1/bn` lies in that of `conv1`. State: `/iter`, `/learned_net`,
`/current_step`, `/history/<i>`; `/caffepy`, which Caffe passes over, holds the fields of our own as a serialised
SolverState. Attributes of the root hold the number of blobs and the checksum of all datasets; see `contents.py`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote

import numpy as np
from google.protobuf.message import DecodeError

from caffepy.config.checksum import wrong_checksum
from caffepy.errors import RunError, SnapshotError
from caffepy.hdf5 import Dataset, Group, find_object, open_hdf5, read_hdf5
from caffepy.net.weights import to_blob_proto
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter, SolverState
from caffepy.snapshot.contents import Content, Contents, content_checksum, datasets

if TYPE_CHECKING:
    from caffepy.net import Net

_CAFFES_FIELDS = ("iter", "learned_net", "current_step", "history")

_QUOTED = "caffepy_quoted"
"""Attribute of the group of a layer whose name is no path that HDF5 would keep; see `layer_paths`."""
_CHECKSUM, _BLOBS = "caffepy_crc32c", "caffepy_blobs"
"""Attributes of the root: `content_checksum`, and the number of blobs under `/data` or `/history`."""

MAX_PARAMETERS = 100
"""Exclusive upper bound of a parameter's index; Caffe's layers have a handful."""


@contextmanager
def _create(target: BinaryIO, blobs: str) -> Iterator[Any]:
    """An HDF5 file built in memory and then written, because h5py does not survive a full disk.

    Args:
        target: the file.
        blobs: the group whose datasets are its blobs.
    """
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        yield file
        file.flush()
        checksum, paths = content_checksum(read_hdf5(buffer))
        file.attrs[_CHECKSUM] = np.uint32(checksum)
        file.attrs[_BLOBS] = np.uint32(sum(path[0] == blobs for path in paths))
    target.write(buffer.getbuffer())


def write_weights_hdf5(target: BinaryIO, net: Net, write_diff: bool) -> None:
    """Write a net's parameters.

    Raises:
        RunError: two layers that have parameters have one name.
    """
    paths = layer_paths(net)
    with _create(target, "data") as file:
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


def layer_paths(net: Net) -> dict[str, str]:
    """The path of each layer's group, by layer name: the name itself where that is unambiguous in HDF5.

    Quoted otherwise: `a//b`, `a/` and `.` would be other paths, `/a` would begin at the file's root, and `a/0` is
    the path of the first parameter of a layer `a`.

    Raises:
        RunError: two layers that have parameters have one name.
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
    """The layers in a .caffemodel.h5, those that hold parameters, with `crc32c` and `blob_count` where it has them.

    A parameter that only another layer holds, with which it is shared, is an empty blob.

    Raises:
        SnapshotError: it is damaged, something else, would read other files or take far more memory than it has bytes.
    """
    result = NetParameter()
    layers: dict[str, dict[int, BlobProto]] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        if not isinstance(find_object(file, "data"), Group):
            what = "a .solverstate.h5; resume from it with --snapshot" if "iter" in file.links else "something else"
            raise SnapshotError(f"{path}: is no .caffemodel.h5 but {what}")
        contents = Contents(file)
        for content in contents:
            if content.path[0] == "data" and len(content.path) > 2:
                name = _layer_name(content)
                layers.setdefault(name, {})[_index(path, name, content)] = to_blob_proto(content.floats())
        _check_whole(path, result, contents, "data")
    _add_layers(result, layers)
    return result


def read_layer_shapes_hdf5(path: Path) -> NetParameter:
    """The layers in a .caffemodel.h5 with names and shapes of blobs alone; arrays are neither read nor checked.

    Raises:
        SnapshotError: it is damaged or something else.
    """
    result = NetParameter()
    layers: dict[str, dict[int, BlobProto]] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        for place, dataset, attributes in datasets(file):
            if place[0] == "data" and len(place) > 2:
                content = Content(place, np.empty(0), attributes)
                name = _layer_name(content)
                shape = BlobShape(dim=dataset.shape or ())
                layers.setdefault(name, {})[_index(path, name, content)] = BlobProto(shape=shape)
    _add_layers(result, layers)
    return result


def _add_layers(param: NetParameter, layers: dict[str, dict[int, BlobProto]]) -> None:
    """Add layers of these names and blobs, by number; a blob that is not stored is an empty one."""
    for name, blobs in layers.items():
        layer = param.layer.add(name=name)
        layer.blobs.extend(blobs.get(index, BlobProto()) for index in range(max(blobs) + 1))


def _layer_name(content: Content) -> str:
    """A layer's name is the path of its group (names such as `inception_3a/1x1` are paths), or that group's alone."""
    group = content.path[1:-1]
    return unquote(group[-1][1:]) if _QUOTED in content.attributes else "/".join(group)


def _index(path: Path, name: str, content: Content) -> int:
    key = content.path[-1]
    if not (key.isdecimal() and len(key) < 9 and key == str(int(key)) and int(key) < MAX_PARAMETERS):
        raise SnapshotError(f"{path}: layer '{name}' has a dataset '{key}', which is no parameter's number")
    return int(key)


def _check_whole(path: Path, message: NetParameter | SolverState, contents: Contents, blobs: str) -> None:
    """Compare what was read with the attributes, which a file of Caffe's has not, and note them in the message."""
    checksum, count = (contents.number(name) for name in (_CHECKSUM, _BLOBS))
    if checksum is None and count is None and not message.HasField("blob_count"):
        return
    found = contents.counts.get(blobs, 0)
    if checksum is None or found != count:
        raise SnapshotError(
            f"{path}: holds {found} of {count or message.blob_count} blobs, or its checksum is not there: it is "
            "truncated or damaged; copy it again or take an older one"
        )
    if contents.checksum != checksum:
        raise SnapshotError(wrong_checksum(str(path), contents.checksum, checksum))
    message.crc32c, message.blob_count = checksum, found


def write_state_hdf5(target: BinaryIO, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history."""
    own = SolverState()
    own.CopyFrom(state)
    for field in _CAFFES_FIELDS:
        own.ClearField(field)
    with _create(target, "history") as file:
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
    import h5py

    content = value.encode()
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(content) + 1)
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_obj_track_times(False)  # the same snapshot gives the same bytes
    stored = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR), settings)
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(content, f"S{len(content) + 1}"), kind)


def read_state_hdf5(path: Path) -> SolverState:
    """The state in a .solverstate.h5, with `crc32c` and `blob_count` where it has them.

    Raises:
        SnapshotError: it is damaged, something else, would read other files or take far more memory than it has bytes.
    """
    state = SolverState()
    history: dict[str, BlobProto] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        if not isinstance(find_object(file, "iter"), Dataset) or "history" not in file.links:
            what = "a .caffemodel.h5; load it with --weights" if "data" in file.links else "something else"
            raise SnapshotError(f"{path}: is no .solverstate.h5 but {what}")
        fields: dict[str, Content] = {}
        contents = Contents(file)
        for content in contents:
            if content.path[0] == "history":
                history["/".join(content.path[1:])] = to_blob_proto(content.floats())
            elif len(content.path) == 1:
                fields[content.path[0]] = content
        _set_fields(state, fields)
        _check_whole(path, state, contents, "history")
    count = len(history)
    for index in map(str, range(count)):
        if index not in history:
            raise SnapshotError(f"{path}: history {index} of {count} is not there; the file is damaged")
        state.history.append(history.pop(index))
    return state


def _set_fields(state: SolverState, fields: dict[str, Content]) -> None:
    """Everything but the history.

    Raises:
        ValueError, TypeError: a dataset does not hold what it should.
    """
    if "caffepy" in fields:
        try:
            state.MergeFromString(fields["caffepy"].array.tobytes())
        except DecodeError as error:
            raise ValueError(f"'/caffepy' does not hold the fields of a state ({error})") from error
    for field in _CAFFES_FIELDS:
        state.ClearField(field)
    state.iter = fields["iter"].number()
    if "current_step" in fields:
        state.current_step = fields["current_step"].number()
    if "learned_net" in fields:
        state.learned_net = fields["learned_net"].text()
