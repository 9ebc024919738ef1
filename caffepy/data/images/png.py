"""PNG sanitising: validate the chunks and drop chunks that do not affect pixels.

OpenCV's decoder trusts chunk lengths: damaged chunks can make it hang or allocate gigabytes. Names and numbers follow
the PNG specification (W3C, third edition).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from caffepy.errors import DataError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"}
"""Chunks that affect pixels (eXIf may rotate the image). Texts, profiles and animations are dropped."""
_DEPTHS = {0: {1, 2, 4, 8, 16}, 2: {8, 16}, 3: {1, 2, 4, 8}, 4: {8, 16}, 6: {8, 16}}
"""Valid bit depths of each colour type."""


def is_png(data: bytes | memoryview) -> bool:
    """Return whether the content begins with the PNG signature."""
    return bytes(data[:8]) == _SIGNATURE


def sanitize_png(data: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG without the chunks that do not affect its pixels.

    Raises:
        DataError: the PNG is damaged. The message follows the image's name.
    """
    chunks, unchanged = [_SIGNATURE], True
    previous, seen = b"", set()
    for name, begin, end in _chunks(data):
        if name == b"IHDR":
            _check_header(data[begin + 8 : end - 4], first=not previous)
        elif not previous:
            raise _damaged("it does not begin with IHDR")
        if name == b"IDAT" and name in seen and previous != name:
            raise _damaged("its IDAT chunks are not consecutive")
        if name == b"IDAT" and name not in seen:
            _check_stream(data[begin + 8 : end - 4])
        if name in _PIXEL_CHUNKS:
            chunks.append(bytes(data[begin:end]))
        else:
            unchanged = False
        previous = name
        seen.add(name)
    if b"IDAT" not in seen:
        raise _damaged("it has no IDAT chunk")
    return data if unchanged else b"".join(chunks)


def _chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of each chunk up to IEND; check the CRC of chunks that affect pixels."""
    at, name = len(_SIGNATURE), b""
    while name != b"IEND":
        if at + 12 > len(data):
            raise _damaged("it ends before IEND")
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise _damaged(f"a chunk of {length} bytes exceeds the file")
        if name in _PIXEL_CHUNKS and zlib.crc32(data[at + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
            raise _damaged(f"the CRC of {name.decode()} is wrong")
        if name not in _PIXEL_CHUNKS and not name[0] & 0x20:
            raise _damaged("it has an unknown critical chunk")
        yield name, at, end
        at = end


def _check_header(header: bytes | memoryview, first: bool) -> None:
    if len(header) != 13 or not first:
        raise _damaged("IHDR is misplaced or has the wrong length")
    width, height, depth, colour, compression, filtering, interlace = struct.unpack(">2I5B", header)
    valid = depth in _DEPTHS.get(colour, ()) and compression == filtering == 0 and interlace <= 1
    if not (valid and 0 < width < 2**31 and 0 < height < 2**31):
        raise _damaged("IHDR has an invalid size, colour type or method")


def _check_stream(begin: bytes | memoryview) -> None:
    """Check the two header bytes of the zlib stream (RFC 1950), which may be split over two chunks."""
    if len(begin) >= 2 and (
        begin[0] & 15 != 8 or begin[0] >> 4 > 7 or (begin[0] << 8 | begin[1]) % 31 or begin[1] & 32
    ):
        raise _damaged("IDAT is not a zlib stream")


def _damaged(how: str) -> DataError:
    return DataError(f"is a damaged PNG: {how}; replace it")
