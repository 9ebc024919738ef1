"""Caffe's binary format: one serialised message, whose large arrays are not parsed.

protobuf would copy each array two or three times: into the message, when an old format is upgraded, and into the bytes
for NumPy. Therefore a message is parsed without its large arrays. Its blobs hold their file offsets (`data_begin`,
`data_end`), and `from_blob_proto` returns views of the file's bytes. Arrays are also written as bytes, in parts.

caffepy's files begin with the number of blobs and end with a CRC-32C (RFC 3720). Both Caffes ignore these fields.
Caffe's own files have neither and are not checked.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError, Message

from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.formats.blobs import format_shape
from caffepy.formats.messages import (
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
from caffepy.formats.proto.caffe_pb2 import (
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
from caffepy.utils.files import atomic_write, open_regular, read_input

log = logging.getLogger(__name__)
S = TypeVar("S", NetParameter, SolverState)

MAX_BYTES = 2**31 - 1
"""protobuf's limit for one message."""
MIN_BYTES = 1 << 16
"""Minimum size of an array that is left in the file's bytes."""
MAX_FIELDS = 100_000
"""Maximum number of fields to scan. A file with more (for example numbers that are not packed) is parsed entirely."""
MAX_AXES = 32
MAX_ELEMENTS = 2**31 - 1
"""Caffe's limits for one blob."""
_MAX_LAYERS, _MAX_BLOBS = 100_000, 1000
"""Maximum layers (and history blobs), and maximum blobs per layer, beyond those of any net."""
WRITE_FAILURE_NOTE = "the files of older snapshots are as they were"
"""Note in the message of a failed write."""
_CHECKSUM_CHUNK = 1 << 24
"""Bytes per call: google_crc32c accepts only `bytes`, so each call copies."""
_PATH_FIELDS = ("source", "root_folder", "mean_file", "meanfile", "file_name", "label_map_file", "video_file")
"""Path fields of layer settings, which Caffe stores in the encoding of the training machine."""
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that Python, NumPy, protobuf and the HDF5 reader raise on damaged files."""
_RAW_TYPES = {DOUBLE: "<f8", FLOAT: "<f4", FLOAT16: "<f2"}
"""NumPy dtypes of ``raw_data_type``."""
_MESSAGE_KINDS = {NetParameter: (".caffemodel", ("layer", "layers")), SolverState: (".solverstate", ("iter",))}
"""File extension of each message, and the fields of which it needs one."""
_DATA, _DIFF = BlobProto.DATA_FIELD_NUMBER, BlobProto.DIFF_FIELD_NUMBER

_OTHER_SETTINGS = "settings of its layers are of another Caffe"

FieldTree: TypeAlias = "Mapping[int, FieldTree]"
"""Field numbers to enter, with the fields to enter in their messages; `_ARRAY` marks the target."""
_ARRAY: FieldTree = {}
_BLOB: FieldTree = {_DATA: _ARRAY}
_ARRAY_FIELDS: dict[type[NetParameter | SolverState], FieldTree] = {
    NetParameter: {
        NetParameter.LAYER_FIELD_NUMBER: {LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
        NetParameter.LAYERS_FIELD_NUMBER: {V1LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
    },
    SolverState: {SolverState.HISTORY_FIELD_NUMBER: _BLOB},
}

_COMMON_NAMES = {
    LayerParameter: "name type bottom top phase loss_weight param blobs propagate_down include exclude",
    V1LayerParameter: "name type bottom top include exclude param blobs blobs_lr weight_decay loss_weight",
}
"""Fields of layers that all Caffes number alike."""
_COMMON = {
    field: frozenset(kind.DESCRIPTOR.fields_by_name[name].number for name in _COMMON_NAMES[kind].split())
    for field, kind in (
        (NetParameter.LAYER_FIELD_NUMBER, LayerParameter),
        (NetParameter.LAYERS_FIELD_NUMBER, V1LayerParameter),
    )
}
"""Their numbers, by the number of the field of NetParameter that holds the layers."""


# -- reading a message ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredMessage(Generic[S]):
    """A parsed message and the file's bytes that hold its large arrays.

    Args:
        message: a blob with `data_end` has the float32 values `content[data_begin:data_end]`.
        content: the file's bytes; empty if all arrays are in the message.
        change: how the file differs from the one that caffepy wrote; '' if it does not, or if Caffe wrote it.
    """

    message: S
    content: bytes = b""
    change: str = ""

    def check_unchanged(self, origin: str, strict: bool) -> None:
        """Report that a program changed the file after caffepy wrote it: scripts edit models.

        Args:
            origin: the file's name.
            strict: refuse the file instead of logging a warning.

        Raises:
            SnapshotError: the file was changed, and `strict` is set.
        """
        if not self.change:
            return
        problem = f"{origin}: changed after caffepy wrote it: {self.change}"
        if strict:
            raise SnapshotError(f"{problem}; it is loaded only where it is named")
        log.warning("%s", problem)


def is_hdf5(path: Path) -> bool:
    """Return whether `path` is a regular file with HDF5's signature."""
    try:
        with open_regular(path) as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError:
        return False


def read_message(
    path: Path, kind: type[S], inline_arrays: bool = False, weights_only: bool = False
) -> StoredMessage[S]:
    """Read the message in a binary file. Call it within `convert_errors`.

    It checks the checksum and the number of blobs, not the values of fields. A file that a program wrote again through
    protobuf is read; `change` of the result says so.

    Args:
        path: the file.
        kind: message type.
        inline_arrays: parse large arrays into the message.
        weights_only: if the settings of a net's layers cannot be parsed, leave them out. Forks number them differently.

    Raises:
        SnapshotError: the file is absent, truncated, too large, or of another kind.
    """
    content = read_input(
        path, "file", SnapshotError, MAX_BYTES, "protobuf can read no more; store larger snapshots as HDF5"
    )
    rest, arrays = (content, set[tuple[int, int]]()) if inline_arrays else split_large_fields(content, kind)
    message = kind()
    if content.startswith((HDF5_MAGIC, LFS_MAGIC)) or is_text(content[:4096]):
        raise SnapshotError(f"{path}: not a binary {kind.DESCRIPTOR.name}: {describe_content(content)}")
    parsed = _parse(rest, message)
    field = _find_invalid_utf8(message) if parsed else ""
    if kind is NetParameter and (not parsed or field):
        plain = kind()
        if _parse(common_fields(rest), plain) and not _find_invalid_utf8(plain):
            if not weights_only:
                raise SnapshotError(f"{path}: {_OTHER_SETTINGS}; give its caffe.proto with --proto FILE")
            message, parsed, field = plain, True, ""
            log.info("%s: %s and are skipped; --proto FILE reads them", path, _OTHER_SETTINGS)
    if not parsed:
        raise SnapshotError(f"{path}: not a binary {kind.DESCRIPTOR.name}: {describe_content(content)}")
    change = check_integrity(message, content, str(path))
    if field:
        raise SnapshotError(f"{path}: {field} is not UTF-8; the file is damaged")
    name, required = _MESSAGE_KINDS[kind]
    if not any(field.name in required for field, _ in message.ListFields()):
        raise SnapshotError(f"{path}: not a {name}: {describe_content(content)}")
    _check_counts(message, str(path))
    _check_offsets(message, arrays, str(path))
    return StoredMessage(message, content if arrays else b"", change)


def common_fields(content: bytes) -> bytes:
    """Return a serialised NetParameter whose layers have only the fields that all Caffes number alike.

    Bytes that are not fields are returned unchanged.
    """
    try:
        return b"".join(_common_parts(memoryview(content), 0, len(content), _COMMON, itertools.count()))
    except WireError:
        return content


def _common_parts(
    view: memoryview, begin: int, end: int, tree: Mapping[int, frozenset[int]], count: Iterator[int]
) -> Iterator[Part]:
    for each in wire_fields(view, begin, end):
        kept = tree.get(each.number)
        if kept is None:
            yield view[each.start : each.end]
            continue
        if next(count) >= MAX_FIELDS or each.kind != DELIMITED:
            raise WireError
        inner = [one for one in wire_fields(view, each.begin, each.end) if one.number in kept]
        yield from encode_delimited(each.number, [view[one.start : one.end] for one in inner])


def _parse(content: bytes, message: Message) -> bool:
    try:
        message.MergeFromString(content)
    except (DecodeError, RecursionError):
        return False
    return True


@contextmanager
def convert_errors(origin: str) -> Iterator[None]:
    """Convert the errors of reading a damaged snapshot to a SnapshotError that names the file.

    Raises:
        SnapshotError: the block raised a ConfigError, a protobuf error or one of `_DAMAGE`.
    """
    try:
        yield
    except ConfigError as error:  # the net cannot be upgraded
        raise SnapshotError(str(error)) from error
    except (*_DAMAGE, DecodeError) as error:
        message_text = (str(error).partition("\n")[0] or type(error).__name__).rstrip(".")
        raise SnapshotError(
            f"{origin}: cannot be read: {message_text}; it is damaged or needs too much memory"
        ) from error


def _find_invalid_utf8(message: Message) -> str:
    """Return the path of the first string that is not UTF-8, which protobuf returns as bytes; '' if there is none."""
    # `_PATH_FIELDS` fields may have another encoding: their bytes are escaped.
    for holder, field, value, path in walk_fields(message):
        texts = value if hasattr(value, "append") else [value]
        if field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in texts):
            if field.name not in _PATH_FIELDS:
                return path
            setattr(holder, field.name, value.decode(errors="backslashreplace"))
    return ""


def _check_counts(message: NetParameter | SolverState, origin: str) -> None:
    """Refuse excessive numbers of layers or blobs, which need few bytes but much time."""
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


def _check_offsets(message: NetParameter | SolverState, arrays: set[tuple[int, int]], origin: str) -> None:
    """Refuse array offsets that the file itself contains."""
    for blob in iter_blobs(message):
        given = blob.HasField("data_begin") or blob.HasField("data_end")
        if given and (blob.data_begin, blob.data_end) not in arrays:
            raise SnapshotError(
                f"{origin}: a blob has data_begin or data_end, which no file contains; the file is damaged"
            )


def iter_blobs(message: NetParameter | SolverState) -> Iterator[BlobProto]:
    """Yield the blobs of a message of any format version."""
    if isinstance(message, SolverState):
        yield from message.history
        return
    layers: list[LayerParameter | V1LayerParameter] = [*message.layer, *message.layers]
    for layer in layers:
        yield from layer.blobs


# -- large arrays -----------------------------------------------------------------------------------------


def split_large_fields(content: bytes, kind: type[NetParameter | SolverState]) -> tuple[bytes, set[tuple[int, int]]]:
    """Split a serialised message from the large arrays of its blobs.

    A message that is damaged or not written as by either Caffe is returned entirely, for protobuf to parse.
    """
    arrays: set[tuple[int, int]] = set()
    try:
        parts = _without_arrays(memoryview(content), 0, len(content), _ARRAY_FIELDS[kind], arrays, itertools.count())
    except WireError:
        return content, set()
    return (b"".join(parts), arrays) if arrays else (content, arrays)


def matching_fields(
    view: IndexableBytes, begin: int, end: int, tree: FieldTree, count: Iterator[int]
) -> Iterator[tuple[WireField, FieldTree]]:
    """Yield the fields of a message that are in `tree`, with their subtrees."""
    for each in wire_fields(view, begin, end):
        if next(count) >= MAX_FIELDS:
            raise WireError
        subtree = tree.get(each.number)
        if subtree is not None:
            yield each, subtree


def _without_arrays(
    view: memoryview, begin: int, end: int, tree: FieldTree, arrays: set[tuple[int, int]], count: Iterator[int]
) -> list[Part]:
    """Return the parts of a message without its arrays; add the arrays' offsets to `arrays`."""
    parts: list[Part] = []
    copied_to, array_count = begin, 0
    for each, subtree in matching_fields(view, begin, end, tree, count):
        if each.kind != DELIMITED:
            raise WireError
        parts.append(view[copied_to : each.start])
        if subtree is _ARRAY:
            array_count += 1
            parts.append(_offset_fields(view, each, arrays))
        else:
            parts += encode_delimited(each.number, _without_arrays(view, each.begin, each.end, subtree, arrays, count))
        copied_to = each.end
    if array_count > 1:  # protobuf concatenates them
        raise WireError
    return [*parts, view[copied_to:end]]


def _offset_fields(view: memoryview, array: WireField, arrays: set[tuple[int, int]]) -> Part:
    """Return the offset fields that replace a large array; small arrays stay."""
    size = array.end - array.begin
    if size < MIN_BYTES:
        return view[array.start : array.end]
    if size % 4:
        raise WireError
    arrays.add((array.begin, array.end))
    return BlobProto(data_begin=array.begin, data_end=array.end).SerializeToString()


# -- arrays and blobs ----------------------------------------------------------------------------------


def to_blob_proto(data: np.ndarray, diff: np.ndarray | None = None) -> BlobProto:
    """Return a BlobProto of a float32 array in logical order (and its gradient), as BVLC Caffe writes it.

    An array without axes has no `shape`.
    """
    return BlobProto.FromString(b"".join(blob_parts(data, diff)))


def blob_parts(data: np.ndarray, diff: np.ndarray | None = None) -> list[Part]:
    """Return the parts of a serialised `to_blob_proto`; C-contiguous float32 arrays are not copied."""
    parts: list[Part] = []
    for number, array in ((_DATA, data), (_DIFF, diff)):
        if array is not None and array.size:
            parts += encode_delimited(number, [np.ascontiguousarray(array, "<f4").reshape(-1).data.cast("B")])
    shape = BlobShape(dim=data.shape) if data.shape else None
    return [*parts, BlobProto(shape=shape).SerializeToString()]


def from_blob_proto(blob: BlobProto, where: str, content: bytes = b"") -> np.ndarray:
    """Return the values of a BlobProto, float32 in its shape; the array may be read-only.

    Supports `data`, `double_data` and NVIDIA's `raw_data`.

    Args:
        blob: the blob.
        where: prefix of error messages.
        content: the file's bytes, if `blob` has `data_end`; see `StoredMessage`.

    Raises:
        SnapshotError: the number of values does not match the shape.
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
    """Check that a BlobProto has all values of its shape, without allocating an array.

    Raises:
        SnapshotError: values are missing.
    """
    check_blob(blob, where)
    count, shape = count_values(blob, where), blob_shape(blob)
    if count != math.prod(shape):
        raise SnapshotError(
            f"{where}: holds {count} values for shape {format_shape(shape)}; the file is damaged or incomplete"
        )


def check_blob(blob: BlobProto, where: str) -> None:
    """Check that a stored blob has the number of values of its shape, or none.

    Raises:
        SnapshotError: the number of values is wrong, the shape is invalid, or values are stored twice or in an unknown
            type.
    """
    axes = len(blob.shape.dim)
    if axes > MAX_AXES:
        raise SnapshotError(f"{where} has {axes} axes, but blobs have at most {MAX_AXES}; the file is damaged")
    shape = blob_shape(blob)
    count = math.prod(shape)
    if any(size < 0 for size in shape) or count > MAX_ELEMENTS:
        raise SnapshotError(f"{where} has the impossible shape {shape}; the file is damaged")
    if sum(map(bool, (blob.data, blob.data_end, blob.double_data, blob.raw_data))) > 1:
        raise SnapshotError(f"{where} holds its values in several ways at once; the file is damaged")
    stored = count_values(blob, where)
    if stored not in (0, count):
        raise SnapshotError(f"{where} holds {stored} values where its shape {shape} needs {count}; the file is damaged")


def count_values(blob: BlobProto, where: str) -> int:
    """Return the number of values in a stored blob.

    Raises:
        SnapshotError: ``raw_data`` has an unsupported type or ends within a value.
    """
    if not blob.raw_data:
        return max(len(blob.data), (blob.data_end - blob.data_begin) // 4, len(blob.double_data))
    if blob.raw_data_type not in _RAW_TYPES:
        kind = Type.Name(blob.raw_data_type)
        raise SnapshotError(f"{where} has raw_data of type {kind}, which is not a type of blobs; the file is damaged")
    size = np.dtype(_RAW_TYPES[blob.raw_data_type]).itemsize
    if len(blob.raw_data) % size:
        raise SnapshotError(f"{where} has {len(blob.raw_data)} bytes of raw_data, which end within a value")
    return len(blob.raw_data) // size


def blob_shape(blob: BlobProto) -> tuple[int, ...]:
    """Return the shape of a stored blob; old files have N, C, H and W instead of ``shape``.

    A blob with neither has no axes: Caffe's `blob.cpp` omits an empty ``shape``.
    """
    if has_old_shape(blob):
        return (blob.num, blob.channels, blob.height, blob.width)
    return tuple(blob.shape.dim)


def has_old_shape(blob: BlobProto) -> bool:
    """Return whether a blob's shape is stored only as N, C, H and W."""
    return not blob.HasField("shape") and any(map(blob.HasField, ("num", "channels", "height", "width")))


def is_stored(blob: BlobProto) -> bool:
    """Return whether a BlobProto has values; an empty one is a shared parameter, stored with its owner only."""
    return (
        bool(blob.data or blob.data_end or blob.double_data or blob.raw_data)
        or blob.HasField("shape")
        or has_old_shape(blob)
    )


def same_shape(blob: BlobProto, shape: tuple[int, ...]) -> bool:
    """Return whether a BlobProto has this shape; leading ones of an old four-number shape are ignored."""
    saved = blob_shape(blob)
    if not has_old_shape(blob):
        return saved == shape
    return len(shape) <= 4 and saved == (1,) * (4 - len(shape)) + shape


def _packed_data(blob: BlobProto) -> np.ndarray:
    """Return the `data` of a BlobProto without creating a Python object per number."""
    if len(blob.data) < 1024:
        return np.array(blob.data, np.float32)
    blob.DiscardUnknownFields()  # a group would end the loop
    wire = memoryview(blob.SerializeToString())
    for each in wire_fields(wire, 0, len(wire)):
        if each.number == _DATA:
            return np.frombuffer(wire[each.begin : each.end], "<f4").astype(np.float32, copy=False)
    return np.array(blob.data, np.float32)


# -- the checksum --------------------------------------------------------------------------------------


def extend_checksum(checksum: int, content: Part) -> int:
    """Return the CRC-32C of `content` appended to data with CRC `checksum` (0: no data)."""
    view = memoryview(content)
    for start in range(0, len(view), _CHECKSUM_CHUNK):
        checksum = google_crc32c.extend(checksum, bytes(view[start : start + _CHECKSUM_CHUNK]))
    return checksum


def with_checksum(kind: type[NetParameter | SolverState], count: int, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of a file, with the leading blob count and the trailing checksum.

    Args:
        kind: message type.
        count: number of blobs.
        parts: serialised parts of the message, which protobuf merges.
    """
    checksum = 0
    for part in itertools.chain([kind(blob_count=count).SerializeToString()], parts):
        checksum = extend_checksum(checksum, part)
        yield part
    yield kind(crc32c=checksum).SerializeToString()


def check_integrity(message: NetParameter | SolverState, content: bytes, origin: str) -> str:
    """Check blob count and checksum of a file of caffepy's; Caffe's files have none.

    caffepy writes `blob_count` first. Protobuf writes it behind all layers or history blobs, so a file that does not
    begin with it and has a checksum is whole, and a program wrote it again. Without a checksum it is a file of Caffe's.

    Raises:
        SnapshotError: the number of blobs or the checksum is wrong.
    """
    has_count, has_checksum = message.HasField("blob_count"), message.HasField("crc32c")
    if not has_count and not has_checksum:
        return ""
    count = sum(1 for _ in iter_blobs(message))
    first = type(message)(blob_count=message.blob_count).SerializeToString()
    if has_count and not content.startswith(first):
        checksum = extend_checksum(0, content)
        return change_text(checksum, message.crc32c, count, message.blob_count) if has_checksum else ""
    last = type(message)(crc32c=message.crc32c).SerializeToString()
    if count != message.blob_count or not has_checksum or not content.endswith(last):
        raise SnapshotError(
            f"{origin}: holds {count} of {message.blob_count} blobs, or its end is missing: it is truncated or "
            "damaged; copy it again or use an older one"
        )
    checksum = extend_checksum(0, memoryview(content)[: -len(last)])
    if checksum != message.crc32c:
        raise SnapshotError(
            f"{origin}: its checksum is {checksum:08x}, but {message.crc32c:08x} was written: the file is damaged; "
            "copy it again or use an older one"
        )
    return ""


def change_text(actual: int, expected: int, count: int, expected_count: int) -> str:
    """Return how checksum and number of blobs differ from the ones that caffepy wrote."""
    blobs = f", and it holds {count} blobs of {expected_count}" if count != expected_count else ""
    return f"its checksum is {actual:08x}, but {expected:08x} was written{blobs}"


# -- writing -------------------------------------------------------------------------------------------


def write_parts(path: Path, parts: Iterable[Part]) -> None:
    """Write the parts of one message, which protobuf merges. Holds one layer in memory at a time.

    Raises:
        RunError: the file cannot be written or exceeds protobuf's limit.
    """
    size = 0
    with atomic_write(path, WRITE_FAILURE_NOTE) as file:
        for part in parts:
            size += len(part)
            if size > MAX_BYTES:
                raise RunError(_too_large(path))
            file.write(part)


def check_size(path: Path, size: int) -> None:
    """Check before training that a file of `size` bytes does not exceed protobuf's limit.

    Raises:
        ConfigError: the file would be too large.
    """
    if size > MAX_BYTES:
        raise ConfigError(_too_large(path))


def _too_large(path: Path) -> str:
    return (
        f"{path}: would be larger than the {MAX_BYTES} bytes that protobuf can read; set snapshot_format: HDF5 in "
        "the solver"
    )
