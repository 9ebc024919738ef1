"""How a binary snapshot of ours shows that it is whole: its number of blobs first, a CRC-32C (RFC 3720) last.

Both are fields that either Caffe passes over. Its own files have neither, and are not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import google_crc32c

from caffepy.config.messages import Part
from caffepy.errors import SnapshotError
from caffepy.proto.caffe_pb2 import BlobProto, NetParameter, SolverState

_STEP = 1 << 24
"""Bytes taken at a time: the library takes `bytes` alone, so that each step is a copy."""


def extend_checksum(checksum: int, content: Part) -> int:
    """The CRC-32C of what had `checksum` (0: nothing) followed by `content`."""
    view = memoryview(content)
    for start in range(0, len(view), _STEP):
        checksum = google_crc32c.extend(checksum, bytes(view[start : start + _STEP]))
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
    count = len(stored_blobs(message))
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


def stored_blobs(message: NetParameter | SolverState) -> list[BlobProto]:
    """The blobs of a snapshot."""
    if isinstance(message, SolverState):
        return list(message.history)
    return [blob for layer in message.layer for blob in layer.blobs]
