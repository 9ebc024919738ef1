"""Caffe's binary format: one serialised message, whose large arrays stay in the file's bytes.

protobuf makes each array two or three times: in the message, in its copy when an old format is upgraded, and in the
bytes that NumPy reads. So a message is parsed without its large arrays; its blobs say where in the file they lie
(`data_begin`, `data_end`), and `from_blob_proto` makes a view of them. Arrays are written as bytes, too, in parts.

A file of ours shows that it is whole: its number of blobs comes first, a CRC-32C (RFC 3720) last. Both are fields that
either Caffe passes over. Caffe's own files have neither, and are not checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError, Message

from caffepy.blob import format_shape
from caffepy.config.messages import (
    DELIMITED,
    HDF5_MAGIC,
    LFS_MAGIC,
    IndexableBytes,
    Part,
    WireError,
    WireField,
    describe_content,
    encode_delimited,
    is_text,
    walk_fields,
    wire_fields,
)
from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.files import atomic_write, open_regular, read_input
from caffepy.proto.caffe_pb2 import (
    DOUBLE,
    FLOAT,
    FLOAT16,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverState,
    Type,
    V1LayerParameter,
)

S = TypeVar("S", NetParameter, SolverState)

MAX_BYTES = 2**31 - 1
"""protobuf's own limit for one message."""
MIN_BYTES = 1 << 16
"""Of an array that stays in the file's bytes."""
MAX_FIELDS = 100_000
"""Of a file whose fields are looked at; in one with more of them, numbers one by one for example, no array stays."""
MAX_AXES = 32
MAX_ELEMENTS = 2**31 - 1
"""Caffe's limits for one blob."""
_MAX_LAYERS, _MAX_BLOBS = 100_000, 1000
"""More layers (and history blobs) than any net has, and blobs than any layer."""
OLDER_FILES = "the files of older snapshots are as they were"
"""What a failed write leaves, for its message."""
_CHECKSUM_STEP = 1 << 24
"""Bytes taken at a time: the library takes `bytes` alone, so that each step is a copy."""
_PATHS = ("source", "root_folder", "mean_file", "meanfile", "file_name", "label_map_file", "video_file")
"""Settings of layers that Caffe writes into a .caffemodel in the encoding of the machine that trained it."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that Python, NumPy, protobuf and the HDF5 reader raise on damaged files."""
_RAW_TYPES = {DOUBLE: "<f8", FLOAT: "<f4", FLOAT16: "<f2"}
"""NumPy's names of the types of ``raw_data``."""
_KINDS = {NetParameter: (".caffemodel", ("layer", "layers")), SolverState: (".solverstate", ("iter",))}
"""What a file of each message is called, and the fields of which it has one."""
_DATA, _DIFF = BlobProto.DATA_FIELD_NUMBER, BlobProto.DIFF_FIELD_NUMBER

Within: TypeAlias = "Mapping[int, Within]"
"""Numbers of the fields whose messages are entered, and what is entered in these; `_ARRAY` is what is looked for."""
_ARRAY: Within = {}
_BLOB: Within = {_DATA: _ARRAY}
_WITHIN: dict[type[NetParameter | SolverState], Within] = {
    NetParameter: {
        NetParameter.LAYER_FIELD_NUMBER: {LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
        NetParameter.LAYERS_FIELD_NUMBER: {V1LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
    },
    SolverState: {SolverState.HISTORY_FIELD_NUMBER: _BLOB},
}


# -- reading a message ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored(Generic[S]):
    """A message that was read, with its arrays.

    Args:
        message: the values of a blob that has `data_end` are `content[data_begin:data_end]`, float32.
        content: the file, if any array lies there.
    """

    message: S
    content: bytes = b""


def is_hdf5(path: Path) -> bool:
    """Whether a regular file is there and begins as HDF5 files do."""
    try:
        with open_regular(path) as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError:
        return False


def read_message(path: Path, kind: type[S], whole: bool = False) -> Stored[S]:
    """The message in a binary file, to be called within `refusing_damage`.

    Its checksum and its number of blobs are checked, the values of its fields are not.

    Args:
        path: the file.
        kind: of message.
        whole: all arrays are in the message.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or of another kind; the message says which.
    """
    content = read_input(
        path, "file", SnapshotError, MAX_BYTES, "protobuf can read no more; store larger snapshots as HDF5"
    )
    rest, arrays = (content, set[tuple[int, int]]()) if whole else split_large_fields(content, kind)
    message = kind()
    if content.startswith((HDF5_MAGIC, LFS_MAGIC)) or is_text(content[:4096]) or not _parse(rest, message):
        raise SnapshotError(f"{path}: not a binary {kind.DESCRIPTOR.name}: {describe_content(content)}")
    check_whole(message, content, str(path))
    if field := _damaged_text(message):
        raise SnapshotError(f"{path}: {field} is not UTF-8; the file is damaged")
    name, required = _KINDS[kind]
    if not any(field.name in required for field, _ in message.ListFields()):
        raise SnapshotError(f"{path}: not a {name}: {describe_content(content)}")
    _check_counts(message, str(path))
    _check_positions(message, arrays, str(path))
    return Stored(message, content if arrays else b"")


def _parse(content: bytes, message: Message) -> bool:
    try:
        message.MergeFromString(content)
    except (DecodeError, RecursionError):
        return False
    return True


@contextmanager
def refusing_damage(origin: str) -> Iterator[None]:
    """Turn the errors that a reader raises on a damaged snapshot into an error that names the file.

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


def _check_counts(message: NetParameter | SolverState, origin: str) -> None:
    """Refuse what a few bytes each can make so many of that looking at them takes minutes.

    Raises:
        SnapshotError: there are more layers or history blobs than any net has, or more blobs than any layer.
    """
    if isinstance(message, SolverState):
        if len(message.history) > _MAX_LAYERS:
            raise SnapshotError(f"{origin}: has {len(message.history)} history blobs; the file is damaged")
        return
    count = max(len(message.layer), len(message.layers))
    if count > _MAX_LAYERS:
        raise SnapshotError(f"{origin}: has {count} layers; the file is damaged")
    layers: list[LayerParameter | V1LayerParameter] = [*message.layer, *message.layers]
    blobs = max((len(layer.blobs) for layer in layers), default=0)
    if blobs > _MAX_BLOBS:
        raise SnapshotError(f"{origin}: has a layer of {blobs} blobs; the file is damaged")


def _check_positions(message: NetParameter | SolverState, arrays: set[tuple[int, int]], origin: str) -> None:
    """Refuse positions of arrays that were in the file before.

    Raises:
        SnapshotError: there are such.
    """
    for blob in stored_blobs(message):
        given = blob.HasField("data_begin") or blob.HasField("data_end")
        if given and (blob.data_begin, blob.data_end) not in arrays:
            raise SnapshotError(
                f"{origin}: a blob has data_begin or data_end, which are in no file; the file is damaged"
            )


def stored_blobs(message: NetParameter | SolverState) -> Iterator[BlobProto]:
    """The blobs of a message of any age."""
    if isinstance(message, SolverState):
        yield from message.history
        return
    layers: list[LayerParameter | V1LayerParameter] = [*message.layer, *message.layers]
    for layer in layers:
        yield from layer.blobs


# -- large arrays stay in the file ---------------------------------------------------------------------


def split_large_fields(content: bytes, kind: type[NetParameter | SolverState]) -> tuple[bytes, set[tuple[int, int]]]:
    """A serialised message without the large arrays of its blobs.

    All of it where it is damaged, or written as neither Caffe does: protobuf is to read that.

    Returns:
        The serialised message, in which `data_begin` and `data_end` stand for each large array; where in `content`
        these arrays lie, (begin, end).
    """
    arrays: set[tuple[int, int]] = set()
    try:
        parts = _without_arrays(memoryview(content), 0, len(content), _WITHIN[kind], arrays, itertools.count())
    except WireError:
        return content, set()
    return (b"".join(parts), arrays) if arrays else (content, arrays)


def fields_within(
    view: IndexableBytes, begin: int, end: int, within: Within, count: Iterator[int]
) -> Iterator[tuple[WireField, Within]]:
    """The fields of a message that `within` names, with the fields that it names in each of them."""
    for each in wire_fields(view, begin, end):
        if next(count) >= MAX_FIELDS:
            raise WireError
        entered = within.get(each.number)
        if entered is not None:
            yield each, entered


def _without_arrays(
    view: memoryview, begin: int, end: int, within: Within, arrays: set[tuple[int, int]], count: Iterator[int]
) -> list[Part]:
    """The bytes of a message, in parts, without its arrays, which are added to `arrays`."""
    parts: list[Part] = []
    taken, found = begin, 0
    for each, entered in fields_within(view, begin, end, within, count):
        if each.kind != DELIMITED:
            raise WireError
        parts.append(view[taken : each.start])
        if entered is _ARRAY:
            found += 1
            parts.append(_position(view, each, arrays))
        else:
            parts += encode_delimited(each.number, _without_arrays(view, each.begin, each.end, entered, arrays, count))
        taken = each.end
    if found > 1:  # protobuf joins them
        raise WireError
    return [*parts, view[taken:end]]


def _position(view: memoryview, array: WireField, arrays: set[tuple[int, int]]) -> Part:
    """The fields of a BlobProto that stand for a large array; a small array stays."""
    size = array.end - array.begin
    if size < MIN_BYTES:
        return view[array.start : array.end]
    if size % 4:
        raise WireError
    arrays.add((array.begin, array.end))
    return BlobProto(data_begin=array.begin, data_end=array.end).SerializeToString()


# -- arrays and blobs ----------------------------------------------------------------------------------


def to_blob_proto(data: np.ndarray, diff: np.ndarray | None = None) -> BlobProto:
    """A BlobProto of a float32 array in logical order (and its derivatives), as BVLC Caffe writes it.

    That of an array without axes has no `shape`.
    """
    return BlobProto.FromString(b"".join(blob_parts(data, diff)))


def blob_parts(data: np.ndarray, diff: np.ndarray | None = None) -> list[Part]:
    """The bytes of `to_blob_proto`, in parts; float32 arrays in C order are not copied."""
    parts: list[Part] = []
    for number, array in ((_DATA, data), (_DIFF, diff)):
        if array is not None and array.size:
            parts += encode_delimited(number, [np.ascontiguousarray(array, "<f4").reshape(-1).data.cast("B")])
    shape = BlobShape(dim=data.shape) if data.shape else None
    return [*parts, BlobProto(shape=shape).SerializeToString()]


def from_blob_proto(blob: BlobProto, where: str, content: bytes = b"") -> np.ndarray:
    """The values of a BlobProto, float32 in its own shape; the array may be read-only.

    Takes `data`, `double_data` and NVIDIA's `raw_data`.

    Args:
        blob: with its values.
        where: for messages.
        content: the file in which they lie if `blob` has `data_end`; see `Stored`.

    Raises:
        SnapshotError: the number of values is not that of the shape.
    """
    check_values(blob, where)
    if blob.data_end:
        values = np.frombuffer(memoryview(content)[blob.data_begin : blob.data_end], "<f4").astype(
            np.float32, copy=False
        )
    elif blob.double_data:
        values = np.array(blob.double_data, np.float32)
    elif blob.raw_data:
        values = np.frombuffer(blob.raw_data, _RAW_TYPES[blob.raw_data_type]).astype(np.float32, copy=False)
    else:
        values = _packed_data(blob)
    return values.reshape(blob_shape(blob))


def check_values(blob: BlobProto, where: str) -> None:
    """Refuse a BlobProto that has not all the values that its shape needs, before any array is made of it.

    Raises:
        SnapshotError: a value is missing.
    """
    check_blob(blob, where)
    count, shape = stored_values(blob, where), blob_shape(blob)
    if count != math.prod(shape):
        raise SnapshotError(
            f"{where}: holds {count} values for shape {format_shape(shape)}; the file is damaged or incomplete"
        )


def check_blob(blob: BlobProto, where: str) -> None:
    """Check that a stored blob holds as many values as its shape says, or none.

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
    if blob.raw_data_type not in _RAW_TYPES:
        kind = Type.Name(blob.raw_data_type)
        raise SnapshotError(f"{where} has raw_data of type {kind}, in which no Caffe stores blobs; the file is damaged")
    size = np.dtype(_RAW_TYPES[blob.raw_data_type]).itemsize
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


def is_stored(blob: BlobProto) -> bool:
    """Whether a BlobProto has values; an empty one is a shared parameter, stored with its owner only."""
    return (
        bool(blob.data or blob.data_end or blob.double_data or blob.raw_data)
        or blob.HasField("shape")
        or has_old_shape(blob)
    )


def same_shape(blob: BlobProto, shape: tuple[int, ...]) -> bool:
    """Whether a BlobProto fits; an old four-number shape fits when it is `shape` with ones before it."""
    saved = blob_shape(blob)
    if not has_old_shape(blob):
        return saved == shape
    return len(shape) <= 4 and saved == (1,) * (4 - len(shape)) + shape


def _packed_data(blob: BlobProto) -> np.ndarray:
    """The `data` of a BlobProto without a Python object for each number."""
    if len(blob.data) < 1024:
        return np.array(blob.data, np.float32)
    blob.DiscardUnknownFields()  # a group among them would end the walk
    wire = memoryview(blob.SerializeToString())
    for each in wire_fields(wire, 0, len(wire)):
        if each.number == _DATA:
            return np.frombuffer(wire[each.begin : each.end], "<f4").astype(np.float32, copy=False)
    return np.array(blob.data, np.float32)


# -- the checksum --------------------------------------------------------------------------------------


def extend_checksum(checksum: int, content: Part) -> int:
    """The CRC-32C of what had `checksum` (0: nothing) followed by `content`."""
    view = memoryview(content)
    for start in range(0, len(view), _CHECKSUM_STEP):
        checksum = google_crc32c.extend(checksum, bytes(view[start : start + _CHECKSUM_STEP]))
    return checksum


def checksummed(kind: type[NetParameter | SolverState], count: int, parts: Iterable[Part]) -> Iterator[Part]:
    """The parts of a file, with the fields that come first and last.

    Args:
        kind: the message that they make.
        count: of its blobs.
        parts: the message, serialised in parts, which protobuf merges.
    """
    checksum = 0
    for part in itertools.chain([kind(blob_count=count).SerializeToString()], parts):
        checksum = extend_checksum(checksum, part)
        yield part
    yield kind(crc32c=checksum).SerializeToString()


def check_whole(message: NetParameter | SolverState, content: bytes, origin: str) -> None:
    """Refuse a file of ours that is cut off or changed; a file of Caffe's has nothing to check.

    Args:
        message: what was read.
        content: the file.
        origin: its name.

    Raises:
        SnapshotError: it has not its number of blobs, or not its checksum.
    """
    if not message.HasField("blob_count") and not message.HasField("crc32c"):
        return
    count = sum(1 for _ in stored_blobs(message))
    last = type(message)(crc32c=message.crc32c).SerializeToString()
    if count != message.blob_count or not message.HasField("crc32c") or not content.endswith(last):
        raise SnapshotError(
            f"{origin}: holds {count} of {message.blob_count} blobs, or its end is not there: it is truncated or "
            "damaged; copy it again or take an older one"
        )
    checksum = extend_checksum(0, memoryview(content)[: -len(last)])
    if checksum != message.crc32c:
        raise SnapshotError(wrong_checksum(origin, checksum, message.crc32c))


def wrong_checksum(origin: str, found: int, written: int) -> str:
    """The message about a file whose checksum is not the one that was written."""
    return (
        f"{origin}: its checksum is {found:08x}, and {written:08x} when it was written: it is damaged; copy it again "
        "or take an older one"
    )


# -- writing -------------------------------------------------------------------------------------------


def write_parts(path: Path, parts: Iterable[Part]) -> None:
    """Write one message in parts, which protobuf reads as if they were merged; holds one layer in memory at a time.

    Raises:
        RunError: the file cannot be written, or would be larger than protobuf can read.
    """
    size = 0
    with atomic_write(path, OLDER_FILES) as file:
        for part in parts:
            size += len(part)
            if size > MAX_BYTES:
                raise RunError(_too_large(path))
            file.write(part)


def check_size(path: Path, size: int) -> None:
    """Refuse a file of so many bytes before training, not at its first snapshot.

    Raises:
        ConfigError: protobuf could not read it.
    """
    if size > MAX_BYTES:
        raise ConfigError(_too_large(path))


def _too_large(path: Path) -> str:
    return (
        f"{path}: would be larger than the {MAX_BYTES} bytes that protobuf can read; set snapshot_format: HDF5 in "
        "the solver"
    )
