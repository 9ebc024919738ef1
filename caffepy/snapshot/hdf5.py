"""The HDF5 form of .caffemodel and .solverstate, as Caffe lays it out. h5py writes, `caffepy.hdf5` reads.

Weights: `/data/<layer>/<index>` (and `/diff`), each parameter under its owner (Caffe's `net.cpp`, ToHDF5). A layer's
name is its path, so that the group of `conv1/bn` lies in that of `conv1`. State: `/iter`, `/learned_net`,
`/current_step`, `/history/<i>`; `/caffepy`, which Caffe passes over, holds the fields of our own as a serialised
SolverState. Attributes of the root hold the number of blobs and the CRC-32C of all datasets.

A file is read once and in one order. Refused are files from strangers that read other files, hold one group in another
twice, or unpack to far more than their own size.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from google.protobuf.message import DecodeError

from caffepy.errors import RunError, SnapshotError
from caffepy.files import atomic_write
from caffepy.hdf5 import Dataset, Group, check_dataset, find_object, open_hdf5, read_hdf5
from caffepy.layers.core.base import Layer
from caffepy.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter, SolverState
from caffepy.snapshot.binary import OLDER_FILES, extend_checksum, to_blob_proto, wrong_checksum

_CAFFES_FIELDS = ("iter", "learned_net", "current_step", "history")

_QUOTED = "caffepy_quoted"
"""Attribute of the group of a layer whose name is no path that HDF5 would keep; see `layer_paths`."""
_CHECKSUM, _BLOBS = "caffepy_crc32c", "caffepy_blobs"
"""Attributes of the root: `content_checksum`, and the number of blobs under `/data` or `/history`."""

MAX_PARAMETERS = 100
"""Exclusive upper bound of a parameter's index; Caffe's layers have a handful."""
_MAX_LEVELS = 100
"""Groups within each other."""
_SMALL = 1 << 26
_MAX_PACKED = 64
"""A file may unpack to `_SMALL` bytes and this many times its own: Caffe does not pack, and weights hardly can be."""
_FLOATS, _INTEGERS = ("f2", "f4", "f8"), ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


# -- the datasets of a file ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """A dataset's values.

    Args:
        path: the names from the root on.
        array: the values, in the dataset's own type.
        attributes: names of its group's attributes.
    """

    path: tuple[str, ...]
    array: np.ndarray
    attributes: frozenset[str]

    def floats(self) -> np.ndarray:
        """The values of a blob.

        Raises:
            TypeError: they are of a type in which no Caffe stores blobs.
        """
        if self.array.dtype.str[1:] not in (*_FLOATS, "i4", "i8"):
            raise TypeError(f"'{'/'.join(self.path)}' is of type {self.array.dtype}; blobs are of floats")
        return np.asarray(self.array, np.float32)

    def number(self) -> int:
        """The value of an array of one number.

        Raises:
            TypeError, ValueError: it is something else.
        """
        if self.array.dtype.kind not in "iu" or self.array.size != 1:
            raise ValueError(f"'{'/'.join(self.path)}' is no whole number but {self.array.dtype}{self.array.shape}")
        return int(self.array.ravel()[0])

    def text(self) -> str:
        """The value of a string.

        Raises:
            ValueError: it is something else, or not UTF-8.
        """
        value = self.array[()]
        if not isinstance(value, bytes):
            raise ValueError(f"'{'/'.join(self.path)}' is no string but {self.array.dtype}{self.array.shape}")
        return bytes(value).decode()


class Contents:
    """All datasets of a file, to be iterated once.

    Args:
        file: its root group.

    Raises, while it is iterated:
        ValueError, TypeError, OSError: the file is damaged or refused.
    """

    def __init__(self, file: Group) -> None:
        self._file = file
        self.checksum = 0
        """Of what was read so far."""
        self.counts: dict[str, int] = {}
        """Datasets read so far, by the first name of their path."""

    def __iter__(self) -> Iterator[Content]:
        size, length = 0, self._file.file.length
        for path, dataset, attributes in datasets(self._file):
            size = check_dataset(dataset, size)
            if size > _SMALL + length * _MAX_PACKED:
                raise ValueError(f"'{dataset.name}' would bring what is read of {length} bytes to {size}; is it whole?")
            array = _read(dataset)
            self.checksum = _extend(self.checksum, path, array)
            self.counts[path[0]] = self.counts.get(path[0], 0) + 1
            yield Content(path, array, attributes)

    def number(self, name: str) -> int | None:
        """An attribute of the root that is a number; None if there is none.

        Raises:
            ValueError: the attribute is something else.
        """
        if name not in self._file.attributes:
            return None
        value = self._file.attributes[name]
        if value is None:
            raise ValueError(f"the attribute '{name}' is no whole number")
        return value


def content_checksum(file: Group) -> tuple[int, list[tuple[str, ...]]]:
    """The CRC-32C of all datasets with their paths, types and shapes, and these paths; of a file of our own."""
    checksum, paths = 0, []
    for path, dataset, _ in datasets(file):
        checksum = _extend(checksum, path, _read(dataset))
        paths.append(path)
    return checksum, paths


def _extend(checksum: int, path: tuple[str, ...], array: np.ndarray) -> int:
    title = f"{'/'.join(path)}\0{array.dtype.str}\0{array.shape}\0"
    return extend_checksum(extend_checksum(checksum, title.encode()), array.tobytes())


def _read(dataset: Dataset) -> np.ndarray:
    """The values, of numbers or of fixed or variable strings.

    Raises:
        TypeError: they are of another type.
    """
    kind = dataset.dtype
    if kind is not None and (kind.str[1:] in (*_FLOATS, *_INTEGERS) or kind.kind == "S"):
        return dataset.read()
    if dataset.is_text and dataset.shape == ():
        return np.array(dataset.text())
    raise TypeError(f"'{dataset.name}' is of type {dataset.kind}, which no snapshot holds")


def datasets(file: Group) -> Iterator[tuple[tuple[str, ...], Dataset, frozenset[str]]]:
    """Path, dataset and the names of its group's attributes; those of a group before those of the groups in it."""
    seen = set()
    waiting: list[tuple[tuple[str, ...], Group]] = [((), file)]
    while waiting:
        path, group = waiting.pop()
        if group.address in seen or len(path) > _MAX_LEVELS:
            raise ValueError(f"the group '{'/'.join(path)[:200]}' is there twice, in itself or too deep in others")
        seen.add(group.address)
        attributes = frozenset(group.attributes) if path else frozenset()
        inner = []
        for name in sorted(group.links, key=lambda name: (len(name), name)):
            group.file.charge(sum(map(len, path)))  # long paths of many datasets take time as well
            item = find_object(group, name)
            if isinstance(item, Dataset):
                yield (*path, name), item, attributes
            elif isinstance(item, Group):
                inner.append(((*path, name), item))
        waiting += reversed(inner)


@contextmanager
def _create(path: Path, blobs: str) -> Iterator[Any]:
    """An HDF5 file built in memory and then written, because h5py does not survive a full disk.

    Args:
        path: the file.
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
    with atomic_write(path, OLDER_FILES) as target:
        target.write(buffer.getbuffer())


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


# -- .caffemodel ---------------------------------------------------------------------------------------


def write_caffemodel_hdf5(path: Path, layers: Sequence[Layer], write_diff: bool = False) -> None:
    """Write the parameters of a net's layers.

    Raises:
        RunError: two layers that have parameters have one name.
    """
    paths = layer_paths(layers)
    with _create(path, "data") as file:
        data = file.create_group("data")
        diff = file.create_group("diff") if write_diff else None
        for layer in layers:
            values = _layer_group(data, paths[layer.name])
            gradients = _layer_group(diff, paths[layer.name]) if diff is not None else None
            for index, blob in enumerate(layer.blobs):
                if blob.gradient_owner is blob:
                    values.create_dataset(str(index), data=blob.host_data())
                if gradients is not None:
                    gradients.create_dataset(str(index), data=blob.host_diff())


def layer_paths(layers: Sequence[Layer]) -> dict[str, str]:
    """The path of each layer's group, by layer name: the name itself where that is unambiguous in HDF5.

    Quoted otherwise: `a//b`, `a/` and `.` would be other paths, `/a` would begin at the file's root, and `a/0` is
    the path of the first parameter of a layer `a`.

    Raises:
        RunError: two layers that have parameters have one name.
    """
    learned = [layer.name for layer in layers if layer.blobs]
    for name in learned:
        if learned.count(name) > 1:
            raise RunError(
                f"two layers of the name '{name}' have parameters, which HDF5 cannot hold; rename one of them, or set "
                "snapshot_format: BINARYPROTO"
            )
    parameter_paths = {f"{layer.name}/{index}" for layer in layers for index in range(len(layer.blobs))}
    return {
        layer.name: layer.name if _is_path(layer.name, parameter_paths) else _quoted(layer.name) for layer in layers
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


def read_caffemodel_hdf5(path: Path) -> NetParameter:
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


# -- .solverstate --------------------------------------------------------------------------------------


def write_solverstate_hdf5(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history."""
    own = SolverState()
    own.CopyFrom(state)
    for field in _CAFFES_FIELDS:
        own.ClearField(field)
    with _create(path, "history") as file:
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


def read_solverstate_hdf5(path: Path) -> SolverState:
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
