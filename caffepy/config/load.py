"""Reading nets, solvers, weights and solver states from files."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from caffepy.config.checksum import check_whole
from caffepy.config.lazy_blobs import SplitMessage, StoredState, TrainedLayers, read_outline, split_large_fields
from caffepy.config.messages import WireError, walk_fields
from caffepy.config.nvidia_wire import adopt_nvidia_fields
from caffepy.config.paths import is_folder
from caffepy.config.text import decode_text, parse_text
from caffepy.config.upgrade import upgrade_net, upgrade_solver
from caffepy.errors import CaffepyError, ConfigError, SnapshotError
from caffepy.files import open_regular, read_regular, working_folder
from caffepy.proto.caffe_pb2 import (
    DOUBLE,
    FLOAT,
    FLOAT16,
    BlobProto,
    NetParameter,
    SolverParameter,
    SolverState,
    Type,
)

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

MAX_BYTES = 2**31 - 1
"""protobuf's own limit for one message."""
MAX_TEXT_BYTES = 2**24
"""Longest prototxt; the largest nets have a few hundred kB."""

_MAX_REMEMBERED = 2**20
"""Longest prototxt whose message is remembered."""

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
LFS_MAGIC = b"version https://git-lfs"
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
ITEM_BYTES = {DOUBLE: 8, FLOAT: 4, FLOAT16: 2}
"""Bytes of one element of ``raw_data``, by its ``Type``."""
MAX_AXES = 32
MAX_ELEMENTS = 2**31 - 1
"""Caffe's limits for one blob."""
_MAX_LAYERS, _MAX_BLOBS = 100_000, 1000
"""More layers (and history blobs) than any net has, and blobs than any layer."""
_PATHS = ("source", "root_folder", "mean_file", "meanfile", "file_name", "label_map_file", "video_file")
"""Settings of layers that Caffe writes into a .caffemodel in the encoding of the machine that trained it."""
_MAX_COUNTED = 2**62
"""Exclusive limit of a state's counts; sums of them fit in 64 bits."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that Python, NumPy, protobuf and the HDF5 reader raise on damaged files."""


def read_net(path: Path | str) -> NetParameter:
    """The net that a prototxt describes, upgraded to the current format.

    Raises:
        ConfigError: the file is absent, not a net's prototxt, or cannot be upgraded.
    """
    param = read_prototxt(path, "net", NetParameter())
    upgrade_net(param, str(path))
    return param


def read_solver(path: Path | str) -> SolverParameter:
    """The solver that a prototxt describes, upgraded, with ``snapshot_prefix`` filled in as Caffe does.

    Without a prefix snapshots go beside the solver's prototxt, under its name; a prefix that is a folder
    gets that name appended.

    Raises:
        ConfigError: the file is absent, not a solver's prototxt, or cannot be upgraded.
    """
    param = read_prototxt(path, "solver", SolverParameter())
    upgrade_solver(param, str(path))
    _complete_snapshot_prefix(param, Path(path))
    return param


def read_prototxt(path: Path | str, kind: str, message: M) -> M:
    """Merges the text in a file, which is a `kind`, into `message` and returns it as it was written.

    Raises:
        ConfigError: the file is absent or no prototxt of such a message.
    """
    text = decode_text(_read_text(path, kind), str(path))
    if len(text) > _MAX_REMEMBERED:
        return parse_text(text, message, str(path))
    new: Any = type(message)
    message.MergeFrom(_parsed(text, new, str(path)))
    return message


@lru_cache(maxsize=8)
def _parsed(text: str, new: Any, origin: str) -> Any:
    """`parse_text` into a new message, which nobody may change: a training reads its net for each device and purpose.

    Python's reader of protobuf text takes 40 ms for ResNet-50.
    """
    return parse_text(text, new(), origin)


def read_weights(path: Path | str) -> NetParameter:
    """The net in a binary .caffemodel of either Caffe and any age, upgraded to the current format.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or not a .caffemodel; the message says
            what it looks like. Also when a blob does not hold as many values as its shape says.
    """
    return _read_layers(path, whole=True).param


def read_trained_layers(path: Path | str) -> TrainedLayers:
    """As `read_weights`, with large arrays in the file's bytes: for those who copy them into a net.

    Raises:
        SnapshotError: as `read_weights`.
    """
    return _read_layers(path, whole=False)


def read_layer_shapes(path: Path | str) -> NetParameter:
    """The layers in a binary .caffemodel with names and shapes of blobs alone; arrays are neither read nor checked.

    Raises:
        SnapshotError: the file is absent, truncated or not a .caffemodel.
    """
    origin = str(path)
    with refusing_damage(origin), open_regular(path) as file:
        try:
            param = read_outline(file, os.fstat(file.fileno()).st_size)
        except WireError:
            param = NetParameter()
        if not param.layer:
            raise SnapshotError(f"{origin}: is truncated or not a .caffemodel")
    return param


def _read_layers(path: Path | str, whole: bool) -> TrainedLayers:
    """The layers in a file, upgraded and checked; with `whole` all is in the message."""
    origin = str(path)
    with refusing_damage(origin):
        content = _read(path, "file", SnapshotError)
        apart = SplitMessage(content) if whole else split_large_fields(content, NetParameter)
        param = _parse_binary(apart.rest, content, NetParameter(), origin)
        if not param.layer and not param.layers:
            raise SnapshotError(f"{origin}: not a .caffemodel: {describe_content(content)}")
        _check_counts(param, origin)
        apart.check(param, origin)
        adopt_nvidia_fields(param)
        upgrade_net(param, origin)
        check_weights(param, origin)
    return TrainedLayers(param, apart.content)


def read_solver_state(path: Path | str) -> SolverState:
    """The solver state in a binary .solverstate.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or not a .solverstate; the message
            says what it looks like. Also when a blob does not hold as many values as its shape says.
    """
    return _read_state(path, whole=True).state


def read_stored_state(path: Path | str) -> StoredState:
    """As `read_solver_state`, with large arrays in the file's bytes: for those who copy the history into a solver.

    Raises:
        SnapshotError: as `read_solver_state`.
    """
    return _read_state(path, whole=False)


def _read_state(path: Path | str, whole: bool) -> StoredState:
    """The state in a file, checked; with `whole` all is in the message."""
    origin = str(path)
    with refusing_damage(origin):
        content = _read(path, "file", SnapshotError)
        apart = SplitMessage(content) if whole else split_large_fields(content, SolverState)
        state = _parse_binary(apart.rest, content, SolverState(), origin)
        if not state.HasField("iter"):
            raise SnapshotError(f"{origin}: not a .solverstate: {describe_content(content)}")
        if len(state.history) > _MAX_LAYERS:
            raise SnapshotError(f"{origin}: has {len(state.history)} history blobs; the file is damaged")
        apart.check(state, origin)
        check_state(state, origin)
    return StoredState(state, apart.content)


def read_binary(path: Path | str, message: M) -> M:
    """Merges the binary message in a file into `message` and returns it.

    Raises:
        SnapshotError: the file is absent, larger than protobuf can read, or does not hold such a message.
    """
    content = _read(path, "file", SnapshotError)
    return _parse_binary(content, content, message, str(path))


def _parse_binary(wire: bytes, content: bytes, message: M, origin: str) -> M:
    """Merges `wire`, which was made of a file's content, into `message` and returns it."""
    kind = message.DESCRIPTOR.name
    if content.startswith((HDF5_MAGIC, LFS_MAGIC)) or _is_text(content[:4096]):
        raise SnapshotError(f"{origin}: not a binary {kind}: {describe_content(content)}")
    try:
        message.MergeFromString(wire)
    except (DecodeError, RecursionError):
        raise SnapshotError(f"{origin}: not a binary {kind}: {describe_content(content)}") from None
    if isinstance(message, (NetParameter, SolverState)):
        check_whole(message, content, origin)
    if field := _damaged_text(message):
        raise SnapshotError(f"{origin}: {field} is not UTF-8; the file is damaged")
    return message


@contextmanager
def refusing_damage(origin: str) -> Iterator[None]:
    """Turn whatever a damaged snapshot makes its reader raise into an error that names the file.

    Raises:
        SnapshotError: the block raised another of caffepy's errors, protobuf's or one of Python's for wrong values.
    """
    try:
        yield
    except ConfigError as error:  # of a net that cannot be upgraded
        raise SnapshotError(str(error)) from error
    except (*_DAMAGE, DecodeError) as error:
        said = (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
        raise SnapshotError(f"{origin}: cannot be read: {said}; it is damaged or needs too much memory") from error


def check_weights(param: NetParameter, origin: str) -> None:
    """Check the blobs of a .caffemodel.

    Raises:
        SnapshotError: one of them makes no sense.
    """
    for layer in param.layer:
        for index, blob in enumerate(layer.blobs):
            check_blob(blob, f"{origin}: layer '{layer.name}' blob {index}")


def check_state(state: SolverState, origin: str) -> None:
    """Check the numbers and blobs of a .solverstate.

    Raises:
        SnapshotError: one of them makes no sense.
    """
    counts = {"iter": state.iter, "current_step": state.current_step, "pass_number": state.pass_number}
    counts |= {"data_position": max((position.position for position in state.data_position), default=0)}
    counts |= {"test_pass_number": max(state.test_pass_number, default=0)}
    for field, count in counts.items():
        if not 0 <= count < _MAX_COUNTED:
            raise SnapshotError(f"{origin}: {field} is {count}, which no training comes to; the file is damaged")
    if not 0 <= state.loss_scale < math.inf:
        raise SnapshotError(f"{origin}: loss_scale is {state.loss_scale}; the file is damaged")
    for index, blob in enumerate(state.history):
        check_blob(blob, f"{origin}: history {index}")


def _check_counts(param: NetParameter, origin: str) -> None:
    """Refuse what a few bytes each can make so many of that looking at them takes minutes.

    Raises:
        SnapshotError: there are more layers than any net has, or more blobs than any layer.
    """
    layers = max(len(param.layer), len(param.layers))
    if layers > _MAX_LAYERS:
        raise SnapshotError(f"{origin}: has {layers} layers; the file is damaged")
    blobs = max(len(layer.blobs) for layers in (param.layer, param.layers) for layer in layers)
    if blobs > _MAX_BLOBS:
        raise SnapshotError(f"{origin}: has a layer of {blobs} blobs; the file is damaged")


def _damaged_text(message: Message) -> str:
    """The first text in a message that is not UTF-8, for which protobuf gives bytes; empty if there is none.

    Paths in the settings of a layer, which no weights need, may be in another encoding: their bytes become escapes.
    """
    for holder, field, value, path in walk_fields(message):
        texts = value if hasattr(value, "append") else [value]
        if field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in texts):
            if field.name not in _PATHS:
                return path
            setattr(holder, field.name, value.decode(errors="backslashreplace"))
    return ""


def check_blob(blob: BlobProto, where: str) -> None:
    """Checks that a stored blob holds as many values as its shape says, or none.

    Raises:
        SnapshotError: it does not, has no possible shape, or has its values twice or in a type of no Caffe's.
    """
    axes = len(blob.shape.dim)
    if axes > MAX_AXES:
        raise SnapshotError(f"{where} has {axes} axes, and blobs have at most {MAX_AXES}; the file is damaged")
    shape = blob_shape(blob)
    count = math.prod(shape)
    if any(size < 0 for size in shape) or count > MAX_ELEMENTS:
        raise SnapshotError(f"{where} has the impossible shape {shape}; the file is damaged")
    if sum(map(bool, (blob.data, blob.data_end, blob.double_data, blob.raw_data))) > 1:
        raise SnapshotError(f"{where} holds its values in several ways at once; the file is damaged")
    stored = stored_values(blob, where)
    if stored not in (0, count):
        raise SnapshotError(f"{where} holds {stored} values where its shape {shape} needs {count}; the file is damaged")


def stored_values(blob: BlobProto, where: str) -> int:
    """The number of values that a stored blob holds, in whichever of its fields.

    Raises:
        SnapshotError: ``raw_data`` is of a type that Caffe does not store, or ends within a value.
    """
    if not blob.raw_data:
        return max(len(blob.data), (blob.data_end - blob.data_begin) // 4, len(blob.double_data))
    size = ITEM_BYTES.get(blob.raw_data_type)
    if size is None:
        kind = Type.Name(blob.raw_data_type)
        raise SnapshotError(f"{where} has raw_data of type {kind}, in which no Caffe stores blobs; the file is damaged")
    if len(blob.raw_data) % size:
        raise SnapshotError(f"{where} has {len(blob.raw_data)} bytes of raw_data, which end within a value")
    return len(blob.raw_data) // size


def blob_shape(blob: BlobProto) -> tuple[int, ...]:
    """The shape of a stored blob; old files give N, C, H and W instead of ``shape``.

    A blob with neither has no axes: Caffe's `blob.cpp` writes ``shape`` only where there is an axis to write.
    """
    if has_old_shape(blob):
        return (blob.num, blob.channels, blob.height, blob.width)
    return tuple(blob.shape.dim)


def has_old_shape(blob: BlobProto) -> bool:
    """Whether a blob's shape is given as N, C, H and W alone."""
    return not blob.HasField("shape") and any(map(blob.HasField, ("num", "channels", "height", "width")))


def _complete_snapshot_prefix(param: SolverParameter, path: Path) -> None:
    if not param.HasField("snapshot_prefix"):
        param.snapshot_prefix = _as_text(str(path.with_suffix("")), path)
        log.info("snapshot_prefix is not given; snapshots will be named %s_iter_N", param.snapshot_prefix)
    elif is_folder(param.snapshot_prefix):
        param.snapshot_prefix = _as_text(str(Path(param.snapshot_prefix) / path.stem), path)
        log.info("snapshot_prefix is a folder; snapshots will be named %s_iter_N", param.snapshot_prefix)


def _as_text(prefix: str, path: Path) -> str:
    """A prefix made of the solver's path, which may hold bytes that no text can."""
    try:
        prefix.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: this path is not UTF-8; rename the file, or give snapshot_prefix") from None
    return prefix


def _read_text(path: Path | str, kind: str) -> bytes:
    advice = f"no {kind}'s prototxt is that long; give the text definition"
    return _read(path, kind, ConfigError, MAX_TEXT_BYTES, advice)


def _read(
    path: Path | str,
    kind: str,
    error_type: type[CaffepyError],
    most: int | None = None,
    advice: str = "protobuf can read no more; store larger snapshots as HDF5",
) -> bytes:
    try:
        return read_regular(path, MAX_BYTES if most is None else most)
    except FileNotFoundError:
        raise error_type(f"{path}: no such {kind}; check the path (working directory: {working_folder()})") from None
    except OSError as error:
        if error.errno == errno.EINVAL and Path(path).is_dir():
            raise error_type(f"{path}: this is a folder; name a {kind} in it") from None
        hint = f"; {advice}" if error.errno == errno.EFBIG else ""
        raise error_type(f"{path}: cannot read the {kind}: {error.strerror}{hint}") from None


def describe_content(data: bytes) -> str:
    """What the content of a binary file that was refused looks like instead, and what to do about it."""
    if not data:
        return "it is empty; an interrupted copy or a full disk leaves such files, take an older one"
    if data.startswith(HDF5_MAGIC):
        return "it is an HDF5 file; rename it so that it ends in .h5"
    if data.startswith(LFS_MAGIC):
        return "it is a Git LFS pointer; fetch the file itself with 'git lfs pull'"
    if data.startswith(_GZIP_MAGIC):
        return "it is packed with gzip; unpack it first, with gunzip"
    if data.startswith(_ZIP_MAGIC):
        return "it is a zip archive; unpack it first, with unzip"
    if _is_text(data[:4096]):
        beginning = data[:24].decode("utf-8", "replace").strip().partition("\n")[0]
        return f"it is text ('{beginning}'); give the binary file"
    if _parses(data, SolverState(), "iter"):
        return "it is a .solverstate; resume from it with --snapshot"
    if _parses(data, NetParameter(), "layer") or _parses(data, NetParameter(), "layers"):
        return "it is a .caffemodel; load it with --weights"
    if _parses(data, BlobProto(), "data"):
        return "it is a single blob, such as a mean image"
    return "it is truncated or of another format; copy it again or take an older one"


def _parses(data: bytes, message: Message, field: str) -> bool:
    try:
        message.MergeFromString(data)
    except (DecodeError, RecursionError):
        return False
    return any(descriptor.name == field for descriptor, _ in message.ListFields())


def _is_text(head: bytes) -> bool:
    printable = sum(byte >= 32 or byte in b"\t\n\r" for byte in head)
    return bool(head) and b"\0" not in head and printable == len(head)
