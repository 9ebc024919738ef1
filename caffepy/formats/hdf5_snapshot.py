"""The HDF5 format of .caffemodel and .solverstate, with Caffe's layout. h5py writes, `caffepy.formats.hdf5` reads.

Weights: `/data/<layer>/<index>` (and `/diff`), each parameter under its owner (Caffe's `net.cpp`, ToHDF5). A layer's
name is its path, so the group of `conv1/bn` lies in the group of `conv1`. State: `/iter`, `/learned_net`,
`/current_step`, `/history/<i>`; `/caffepy`, which Caffe ignores, holds caffepy's own fields as a serialised
SolverState. Attributes of the root hold the number of blobs and the CRC-32C of all datasets.

A file is read once, in a fixed order. Files are refused if they refer to other files, contain a group twice, or unpack
to far more than their extra_fields size.
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
from caffepy.formats.binary import WRITE_FAILURE_NOTE, StoredMessage, change_text, extend_checksum, to_blob_proto
from caffepy.formats.blobs import StoredLayer
from caffepy.formats.hdf5 import Dataset, Group, check_dataset, find_object, open_hdf5, read_hdf5
from caffepy.formats.proto.caffe_pb2 import BlobProto, BlobShape, NetParameter, SolverState
from caffepy.utils.files import atomic_write

_CAFFE_FIELDS = ("iter", "learned_net", "current_step", "history")

_QUOTED_ATTRIBUTE = "caffepy_quoted"
"""Attribute of a layer's group whose name is quoted; see `layer_paths`."""
_CHECKSUM, _BLOB_COUNT = "caffepy_crc32c", "caffepy_blobs"
"""Attributes of the root: `content_checksum`, and the number of blobs under `/data` or `/history`."""

MAX_PARAMETERS = 100
"""Exclusive upper bound of a parameter's index; Caffe's layers have a handful."""
_MAX_DEPTH = 100
"""Maximum depth of nested groups."""
_MIN_SIZE_LIMIT = 1 << 26
_MAX_UNPACK_RATIO = 64
"""A file may unpack to `_MIN_SIZE_LIMIT` bytes plus this multiple of its size: weights hardly compress."""
_FLOATS, _INTEGERS = ("f2", "f4", "f8"), ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


# -- datasets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetContent:
    """A dataset with its values.

    Args:
        path: names from the root.
        array: the values, in the dataset's type.
        attributes: names of the attributes of its group.
    """

    path: tuple[str, ...]
    array: np.ndarray
    attributes: frozenset[str]

    def floats(self) -> np.ndarray:
        """Return the values as float32.

        Raises:
            TypeError: the type is not one of blobs.
        """
        if self.array.dtype.str[1:] not in (*_FLOATS, "i4", "i8"):
            raise TypeError(f"'{'/'.join(self.path)}' has type {self.array.dtype}; blobs hold floats")
        return np.asarray(self.array, np.float32)

    def number(self) -> int:
        """Return the value of an array with one integer.

        Raises:
            ValueError: the dataset is not an integer.
        """
        if self.array.dtype.kind not in "iu" or self.array.size != 1:
            raise ValueError(f"'{'/'.join(self.path)}' is not an integer but {self.array.dtype}{self.array.shape}")
        return int(self.array.ravel()[0])

    def text(self) -> str:
        """Return the value of a string.

        Raises:
            ValueError: the dataset is not a UTF-8 string.
        """
        value = self.array[()]
        if not isinstance(value, bytes):
            raise ValueError(f"'{'/'.join(self.path)}' is not a string but {self.array.dtype}{self.array.shape}")
        return bytes(value).decode()


class DatasetReader:
    """Iterator over all datasets of a file with their values. Iterate once.

    Args:
        file: the root group.

    Raises, during iteration:
        ValueError, TypeError, OSError: the file is damaged or refused.
    """

    def __init__(self, file: Group) -> None:
        self._file = file
        self.checksum = 0
        """CRC-32C of the datasets read so far."""
        self.counts: dict[str, int] = {}
        """Number of datasets read so far, by the first name of their path."""

    def __iter__(self) -> Iterator[DatasetContent]:
        size, length = 0, self._file.file.length
        for path, dataset, attributes in datasets(self._file):
            size = check_dataset(dataset, size)
            if size > _MIN_SIZE_LIMIT + length * _MAX_UNPACK_RATIO:
                raise ValueError(
                    f"'{dataset.name}' would unpack a file of {length} bytes to {size}; the file is damaged"
                )
            array = _read(dataset)
            self.checksum = _extend_checksum(self.checksum, path, array)
            self.counts[path[0]] = self.counts.get(path[0], 0) + 1
            yield DatasetContent(path, array, attributes)

    def number(self, name: str) -> int | None:
        """Return an integer attribute of the root, or None.

        Raises:
            ValueError: the attribute is not an integer.
        """
        if name not in self._file.attributes:
            return None
        value = self._file.attributes[name]
        if value is None:
            raise ValueError(f"the attribute '{name}' is not an integer")
        return value


def content_checksum(file: Group) -> tuple[int, list[tuple[str, ...]]]:
    """Return the CRC-32C of all datasets with paths, types and shapes, and the list of paths."""
    checksum, paths = 0, []
    for path, dataset, _ in datasets(file):
        checksum = _extend_checksum(checksum, path, _read(dataset))
        paths.append(path)
    return checksum, paths


def _extend_checksum(checksum: int, path: tuple[str, ...], array: np.ndarray) -> int:
    title = f"{'/'.join(path)}\0{array.dtype.str}\0{array.shape}\0"
    return extend_checksum(extend_checksum(checksum, title.encode()), array.tobytes())


def _read(dataset: Dataset) -> np.ndarray:
    """Return the values: numbers, or fixed or variable strings."""
    kind = dataset.dtype
    if kind is not None and (kind.str[1:] in (*_FLOATS, *_INTEGERS) or kind.kind == "S"):
        return dataset.read()
    if dataset.is_text and dataset.shape == ():
        return np.array(dataset.text())
    raise TypeError(f"'{dataset.name}' has type {dataset.kind}, which snapshots do not contain")


def datasets(file: Group) -> Iterator[tuple[tuple[str, ...], Dataset, frozenset[str]]]:
    """Yield path, dataset and attribute names of its group; a group's datasets come before those of its subgroups."""
    seen = set()
    stack: list[tuple[tuple[str, ...], Group]] = [((), file)]
    while stack:
        path, group = stack.pop()
        if group.address in seen or len(path) > _MAX_DEPTH:
            raise ValueError(
                f"the group '{'/'.join(path)[:200]}' occurs twice, contains itself or is nested too deeply"
            )
        seen.add(group.address)
        attributes = frozenset(group.attributes) if path else frozenset()
        subgroups = []
        for name in sorted(group.links, key=lambda name: (len(name), name)):
            group.file.charge(sum(map(len, path)))  # bounds the time for long paths
            item = find_object(group, name)
            if isinstance(item, Dataset):
                yield (*path, name), item, attributes
            elif isinstance(item, Group):
                subgroups.append(((*path, name), item))
        stack += reversed(subgroups)


@contextmanager
def _create(path: Path, blobs: str) -> Iterator[Any]:
    """Build an HDF5 file in memory, then write it atomically: h5py does not survive a full disk."""
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        yield file
        file.flush()
        checksum, paths = content_checksum(read_hdf5(buffer))
        file.attrs[_CHECKSUM] = np.uint32(checksum)
        file.attrs[_BLOB_COUNT] = np.uint32(sum(path[0] == blobs for path in paths))
    with atomic_write(path, WRITE_FAILURE_NOTE) as target:
        target.write(buffer.getbuffer())


def _check_integrity(message: NetParameter | SolverState, contents: DatasetReader, blobs: str) -> str:
    """Compare checksum and blob count with the attributes and store them in the message; Caffe writes none."""
    checksum, count = (contents.number(name) for name in (_CHECKSUM, _BLOB_COUNT))
    message.ClearField("blob_count")
    if checksum is None:
        return ""
    actual = contents.counts.get(blobs, 0)
    message.crc32c, message.blob_count = checksum, actual
    if (contents.checksum, actual) == (checksum, count):
        return ""
    return change_text(contents.checksum, checksum, actual, count or 0)


# -- .caffemodel ---------------------------------------------------------------------------------------


def write_caffemodel_hdf5(path: Path, layers: Sequence[StoredLayer], write_diff: bool = False) -> None:
    """Write the parameters of a net's layers.

    Raises:
        RunError: two layers with parameters have the same name.
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


def layer_paths(layers: Sequence[StoredLayer]) -> dict[str, str]:
    """Return the group path of each layer, by layer name: the name itself if HDF5 keeps it as a path.

    Other names are quoted: HDF5 would normalise `a//b`, `a/` and `.`; `/a` would start at the root; and `a/0` is the
    path of
    the first parameter of a layer `a`.

    Raises:
        RunError: two layers with parameters have the same name.
    """
    learned = [layer.name for layer in layers if layer.blobs]
    for name in learned:
        if learned.count(name) > 1:
            raise RunError(
                f"two layers named '{name}' have parameters, which HDF5 cannot store; rename one of them, or set "
                "snapshot_format: BINARYPROTO"
            )
    parameter_paths = {f"{layer.name}/{index}" for layer in layers for index in range(len(layer.blobs))}
    return {
        layer.name: layer.name if _is_path(layer.name, parameter_paths) else _quote_name(layer.name) for layer in layers
    }


def _is_path(name: str, parameter_paths: set[str]) -> bool:
    """Return whether a layer's name can be its path: HDF5 keeps it, and no prefix is a parameter's path."""
    parts = name.split("/")
    prefixes = ("/".join(parts[: count + 1]) for count in range(len(parts)))
    plain = "\0" not in name and not name.startswith("%") and not any(part in ("", ".") for part in parts)
    return plain and not any(prefix in parameter_paths for prefix in prefixes)


def _quote_name(name: str) -> str:
    """Return a unique name without slashes; names that begin with % are always quoted."""
    return "%" + quote(name, safe="")


def _layer_group(parent: Any, path: str) -> Any:
    group = parent.require_group(path)
    if path.startswith("%"):
        group.attrs[_QUOTED_ATTRIBUTE] = 1
    return group


def read_caffemodel_hdf5(path: Path) -> StoredMessage[NetParameter]:
    """Read the layers with parameters of a .caffemodel.h5; set `crc32c` and `blob_count` if stored.

    A shared parameter that another layer stores is an empty blob.

    Raises:
        SnapshotError: the file is damaged, of another kind, refers to other files, or unpacks to far more than its
            size.
    """
    result = NetParameter()
    layers: dict[str, dict[int, BlobProto]] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        if not isinstance(find_object(file, "data"), Group):
            kind = "a .solverstate.h5; resume from it with --snapshot" if "iter" in file.links else "another file"
            raise SnapshotError(f"{path}: is not a .caffemodel.h5 but {kind}")
        contents = DatasetReader(file)
        for content in contents:
            if content.path[0] == "data" and len(content.path) > 2:
                name = _layer_name(content)
                layers.setdefault(name, {})[_index(path, name, content)] = to_blob_proto(content.floats())
        change = _check_integrity(result, contents, "data")
    _add_layers(result, layers)
    return StoredMessage(result, change=change)


def read_layer_shapes_hdf5(path: Path) -> NetParameter:
    """Read layer names and blob shapes of a .caffemodel.h5; arrays are neither read nor checked.

    Raises:
        SnapshotError: the file is damaged or of another kind.
    """
    result = NetParameter()
    layers: dict[str, dict[int, BlobProto]] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        for names, dataset, attributes in datasets(file):
            if names[0] == "data" and len(names) > 2:
                content = DatasetContent(names, np.empty(0), attributes)
                name = _layer_name(content)
                shape = BlobShape(dim=dataset.shape or ())
                layers.setdefault(name, {})[_index(path, name, content)] = BlobProto(shape=shape)
    _add_layers(result, layers)
    return result


def _add_layers(param: NetParameter, layers: dict[str, dict[int, BlobProto]]) -> None:
    """Add layers with these blobs by index; missing blobs are empty."""
    for name, blobs in layers.items():
        layer = param.layer.add(name=name)
        layer.blobs.extend(blobs.get(index, BlobProto()) for index in range(max(blobs) + 1))


def _layer_name(content: DatasetContent) -> str:
    """Return a layer's name: the path of its group (for example `inception_3a/1x1`), or the unquoted group name."""
    group = content.path[1:-1]
    return unquote(group[-1][1:]) if _QUOTED_ATTRIBUTE in content.attributes else "/".join(group)


def _index(path: Path, name: str, content: DatasetContent) -> int:
    key = content.path[-1]
    if not (key.isdecimal() and len(key) < 9 and key == str(int(key)) and int(key) < MAX_PARAMETERS):
        raise SnapshotError(f"{path}: layer '{name}' has a dataset '{key}', which is not a parameter index")
    return int(key)


# -- .solverstate --------------------------------------------------------------------------------------


def write_solverstate_hdf5(path: Path, state: SolverState, history: Iterable[np.ndarray]) -> None:
    """Write a solver's state and history."""
    extra_fields = SolverState()
    extra_fields.CopyFrom(state)
    for field in _CAFFE_FIELDS:
        extra_fields.ClearField(field)
    with _create(path, "history") as file:
        file["iter"] = np.array([state.iter], np.int32)
        _write_string(file, "learned_net", state.learned_net)
        file["current_step"] = np.array([state.current_step], np.int32)
        file["caffepy"] = np.frombuffer(extra_fields.SerializeToString(), np.uint8)
        group = file.create_group("history")
        for index, values in enumerate(history):
            group.create_dataset(str(index), data=values)


def _write_string(file: Any, name: str, value: str) -> None:
    """Write a scalar string of fixed length including its terminating NUL, as H5LTmake_dataset_string."""
    # Caffe reads the type's size in bytes and expects the NUL in them (`util/hdf5.cpp`, hdf5_load_string).
    import h5py

    content = value.encode()
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(content) + 1)
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_obj_track_times(False)  # reproducible bytes
    stored = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR), settings)
    stored.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(content, f"S{len(content) + 1}"), kind)


def read_solverstate_hdf5(path: Path) -> StoredMessage[SolverState]:
    """Read a .solverstate.h5; set `crc32c` and `blob_count` if stored.

    Raises:
        SnapshotError: the file is damaged, of another kind, refers to other files, or unpacks to far more than its
            size.
    """
    state = SolverState()
    history: dict[str, BlobProto] = {}
    with open_hdf5(path, SnapshotError, "snapshot") as file:
        if not isinstance(find_object(file, "iter"), Dataset) or "history" not in file.links:
            kind = "a .caffemodel.h5; load it with --weights" if "data" in file.links else "another file"
            raise SnapshotError(f"{path}: is not a .solverstate.h5 but {kind}")
        fields: dict[str, DatasetContent] = {}
        contents = DatasetReader(file)
        for content in contents:
            if content.path[0] == "history":
                history["/".join(content.path[1:])] = to_blob_proto(content.floats())
            elif len(content.path) == 1:
                fields[content.path[0]] = content
        _set_fields(state, fields)
        change = _check_integrity(state, contents, "history")
    count = len(history)
    for index in map(str, range(count)):
        if index not in history:
            raise SnapshotError(f"{path}: history {index} of {count} is missing; the file is damaged")
        state.history.append(history.pop(index))
    return StoredMessage(state, change=change)


def _set_fields(state: SolverState, fields: dict[str, DatasetContent]) -> None:
    """Set all fields except the history."""
    if "caffepy" in fields:
        try:
            state.MergeFromString(fields["caffepy"].array.tobytes())
        except DecodeError as error:
            raise ValueError(f"'/caffepy' does not hold the fields of a state ({error})") from error
    for field in _CAFFE_FIELDS:
        state.ClearField(field)
    state.iter = fields["iter"].number()
    if "current_step" in fields:
        state.current_step = fields["current_step"].number()
    if "learned_net" in fields:
        state.learned_net = fields["learned_net"].text()
