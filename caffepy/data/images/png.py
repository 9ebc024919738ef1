"""PNG files as a decoder may have them: whole, and without the chunks that do not change the pixels.

OpenCV's decoder does not come back from some files whose chunks are damaged, and takes gigabytes for others: it
believes their lengths. Names and numbers are those of the PNG specification (W3C, third edition).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from caffepy.errors import DataError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT = {b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"}
"""Chunks that pixels depend on: an eXIf may turn the image. Left out are texts, profiles and animations."""
_DEPTHS = {0: {1, 2, 4, 8, 16}, 2: {8, 16}, 3: {1, 2, 4, 8}, 4: {8, 16}, 6: {8, 16}}
"""Bits of a sample that each colour type may have."""


def is_png(data: bytes | memoryview) -> bool:
    """Whether a file says that it is a PNG."""
    return bytes(data[:8]) == _SIGNATURE


def whole_png(data: bytes | memoryview) -> bytes | memoryview:
    """A PNG without the chunks that do not change its pixels.

    Raises:
        DataError: it is damaged; the message continues a sentence that begins with the image's name.
    """
    kept, complete = [_SIGNATURE], True
    before, names = b"", set()
    for name, begin, end in _chunks(data):
        if name == b"IHDR":
            _check_header(data[begin + 8 : end - 4], first=not before)
        elif not before:
            raise _damaged("it does not begin with its header")
        if name == b"IDAT" and name in names and before != name:
            raise _damaged("its pixels are not in one piece")
        if name == b"IDAT" and name not in names:
            _check_stream(data[begin + 8 : end - 4])
        if name in _KEPT:
            kept.append(bytes(data[begin:end]))
        else:
            complete = False
        before = name
        names.add(name)
    if b"IDAT" not in names:
        raise _damaged("it has no pixels")
    return data if complete else b"".join(kept)


def _chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of each chunk up to the last, IEND; those that pixels depend on have the right checksum."""
    at, name = len(_SIGNATURE), b""
    while name != b"IEND":
        if at + 12 > len(data):
            raise _damaged("it ends before its last chunk")
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise _damaged(f"a chunk of {length} bytes goes beyond its end")
        if name in _KEPT and zlib.crc32(data[at + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
            raise _damaged(f"the checksum of its {name.decode()} is wrong")
        if name not in _KEPT and not name[0] & 0x20:
            raise _damaged("it has a chunk that no PNG has")
        yield name, at, end
        at = end


def _check_header(header: bytes | memoryview, first: bool) -> None:
    if len(header) != 13 or not first:
        raise _damaged("its header is not one")
    width, height, depth, colour, compression, filtering, interlace = struct.unpack(">2I5B", header)
    possible = depth in _DEPTHS.get(colour, ()) and compression == filtering == 0 and interlace <= 1
    if not (possible and 0 < width < 2**31 and 0 < height < 2**31):
        raise _damaged("its header has sizes or a kind that no PNG has")


def _check_stream(begin: bytes | memoryview) -> None:
    """The zlib stream's first two bytes (RFC 1950), which may lie in two chunks."""
    if len(begin) >= 2 and (
        begin[0] & 15 != 8 or begin[0] >> 4 > 7 or (begin[0] << 8 | begin[1]) % 31 or begin[1] & 32
    ):
        raise _damaged("its pixels are no zlib stream")


def _damaged(how: str) -> DataError:
    return DataError(f"is a damaged PNG: {how}; replace it")
