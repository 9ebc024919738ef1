"""Large arrays of a binary snapshot stay in the file's bytes; the messages that are read hold where they lie.

protobuf makes each array two or three times: in the message, in its copy when an old format is upgraded, and in the
bytes that NumPy reads. Owns the way from a file's bytes to bytes without large arrays. `config/load.py` reads these,
`net/weights.py` takes the arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, TypeAlias

from caffepy.config.messages import DELIMITED, Indexed, Part, WireError, WireField, delimited, wire_fields
from caffepy.errors import SnapshotError
from caffepy.proto.caffe_pb2 import BlobProto, LayerParameter, NetParameter, SolverState, V1LayerParameter

MIN_BYTES = 1 << 16
"""Of an array that stays in the file's bytes."""
MAX_FIELDS = 100_000
"""Of a file whose fields are looked at; in one with more of them, numbers one by one for example, no array stays."""

Within: TypeAlias = "Mapping[int, Within]"
"""Numbers of the fields whose messages are entered, and what is entered in these; `_ARRAY` is what is looked for."""
_ARRAY: Within = {}
_BLOB: Within = {BlobProto.DATA_FIELD_NUMBER: _ARRAY}
_WITHIN: dict[type[NetParameter | SolverState], Within] = {
    NetParameter: {
        NetParameter.LAYER_FIELD_NUMBER: {LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
        NetParameter.LAYERS_FIELD_NUMBER: {V1LayerParameter.BLOBS_FIELD_NUMBER: _BLOB},
    },
    SolverState: {SolverState.HISTORY_FIELD_NUMBER: _BLOB},
}


MAX_OUTLINE_BYTES = 1 << 24
"""Of all names and shapes of a .caffemodel."""
_SHAPE: Within = {
    field.number: {}
    for name, field in BlobProto.DESCRIPTOR.fields_by_name.items()
    if name in ("shape", "num", "channels", "height", "width")
}
_OUTLINE: Within = {
    NetParameter.LAYER_FIELD_NUMBER: {
        LayerParameter.NAME_FIELD_NUMBER: {},
        LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
    NetParameter.LAYERS_FIELD_NUMBER: {
        V1LayerParameter.NAME_FIELD_NUMBER: {},
        V1LayerParameter.BLOBS_FIELD_NUMBER: _SHAPE,
    },
}
"""Fields that say of which net a .caffemodel is."""


@dataclass(frozen=True)
class TrainedLayers:
    """Layers with their parameters.

    Args:
        param: of a blob that has `data_end`, the values of `data` are `content[data_begin:data_end]`, float32.
        content: the file, if any array lies there.
    """

    param: NetParameter
    content: bytes = b""


@dataclass(frozen=True)
class StoredState:
    """A solver's state with its history.

    Args:
        state: its blobs are as those of `TrainedLayers`.
        content: likewise.
    """

    state: SolverState
    content: bytes = b""


@dataclass
class SplitMessage:
    """A file's bytes without the large arrays.

    Args:
        rest: the serialised message; each array is replaced by `data_begin` and `data_end`.
        content: the file, if any array lies there.
        arrays: where they lie, (begin, end).
    """

    rest: bytes
    content: bytes = b""
    arrays: set[tuple[int, int]] = field(default_factory=set)

    def check(self, message: NetParameter | SolverState, origin: str) -> None:
        """Refuse positions that were in the file before.

        Raises:
            SnapshotError: there are such.
        """
        for blob in _blobs(message):
            given = blob.HasField("data_begin") or blob.HasField("data_end")
            if given and (blob.data_begin, blob.data_end) not in self.arrays:
                raise SnapshotError(
                    f"{origin}: a blob has data_begin or data_end, which are in no file; the file is damaged"
                )


def _blobs(message: NetParameter | SolverState) -> Iterator[BlobProto]:
    """The blobs of a message of any age."""
    if isinstance(message, SolverState):
        yield from message.history
        return
    layers: list[LayerParameter | V1LayerParameter] = [*message.layer, *message.layers]
    for layer in layers:
        yield from layer.blobs


def split_large_fields(content: bytes, kind: type[NetParameter | SolverState]) -> SplitMessage:
    """A serialised message without the large arrays of its blobs.

    All of it where it is damaged, or written as neither Caffe does: protobuf is to read that.
    """
    arrays: set[tuple[int, int]] = set()
    try:
        parts = _without_arrays(memoryview(content), 0, len(content), _WITHIN[kind], arrays, itertools.count())
    except WireError:
        return SplitMessage(content)
    return SplitMessage(b"".join(parts), content, arrays) if arrays else SplitMessage(content)


def _fields_within(
    view: Indexed, begin: int, end: int, within: Within, count: Iterator[int]
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
    for each, entered in _fields_within(view, begin, end, within, count):
        if each.kind != DELIMITED:
            raise WireError
        parts.append(view[taken : each.start])
        if entered is _ARRAY:
            found += 1
            parts.append(_where(view, each, arrays))
        else:
            parts += delimited(each.number, _without_arrays(view, each.begin, each.end, entered, arrays, count))
        taken = each.end
    if found > 1:  # protobuf joins them
        raise WireError
    return [*parts, view[taken:end]]


def _where(view: memoryview, array: WireField, arrays: set[tuple[int, int]]) -> Part:
    """What stands in a BlobProto in place of an array."""
    size = array.end - array.begin
    if size < MIN_BYTES:
        return view[array.start : array.end]
    if size % 4:
        raise WireError
    arrays.add((array.begin, array.end))
    return BlobProto(data_begin=array.begin, data_end=array.end).SerializeToString()


# -- outlines ------------------------------------------------------------------------------------------


def read_outline(file: BinaryIO, size: int) -> NetParameter:
    """The layers in a .caffemodel with names and shapes of blobs alone. Arrays are passed over, not read.

    Args:
        file: open for reading.
        size: its bytes.

    Raises:
        WireError: these are no fields, or more names and shapes than any net has.
        IndexError, google.protobuf.message.DecodeError: the file is damaged.
    """
    parts = _outline(_FileBytes(file), 0, size, _OUTLINE, itertools.count())
    param = NetParameter.FromString(b"".join(parts))
    param.layer.extend(LayerParameter(name=layer.name, blobs=layer.blobs) for layer in param.layers)
    return param


class _FileBytes:
    """A file's bytes, read one by one through its buffer, and `MAX_OUTLINE_BYTES` of them at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._taken = 0

    def __getitem__(self, at: int, /) -> int:
        self._file.seek(at)
        return self._file.read(1)[0]

    def part(self, begin: int, end: int) -> bytes:
        """Some of them at once."""
        self._taken += end - begin
        if self._taken > MAX_OUTLINE_BYTES:
            raise WireError
        self._file.seek(begin)
        return self._file.read(end - begin)


def _outline(view: _FileBytes, begin: int, end: int, within: Within, count: Iterator[int]) -> Iterator[Part]:
    """The bytes of a message with the fields of `within` alone; those that enter no further are taken whole."""
    for each, entered in _fields_within(view, begin, end, within, count):
        if not entered:
            yield view.part(each.start, each.end)
        elif each.kind != DELIMITED:
            raise WireError
        else:
            yield from delimited(each.number, list(_outline(view, each.begin, each.end, entered, count)))
