"""The header of a JPEG file: its size, and whether one thread may decode it together with others.

`bulk_copy` runs it as machine code, `datum` in Python. Marker names and offsets follow ITU-T T.81, annex B, and JFIF's
and Adobe's application segments.
"""

from __future__ import annotations

import numpy as np

from caffepy.backend.cpu.jit.deferred import Bytes, Int, part

_BASELINE, _TABLES, _EXTENSION, _ARITHMETIC = 0xC0, 0xC4, 0xC8, 0xCC
_FIRST_FRAME, _LAST_FRAME = 0xC0, 0xCF
_SCAN, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_EXIF, _ADOBE = 0x45786966, 0x41646F62
"""The first four letters of the segments' names."""
_TRANSFORM_AT = 15
"""Offset of the byte in Adobe's segment, from its marker, that is 1 for YCbCr."""


@part
def _number(file: Bytes, at: Int, size: Int) -> Int:
    """Return a big-endian number of `size` bytes."""
    value: Int = 0
    for i in range(size):
        value = value << 8 | np.int64(file[at + i])
    return value


@part
def jpeg_size(file: Bytes, begin: Int, end: Int, ignores_orientation: Int) -> tuple[Int, Int, Int]:
    """Return height and width of a JPEG, and 1 if it is plain; zeros if its header is damaged or of another format.

    A plain JPEG is complete and baseline, with three channels, YCbCr, of 8 bits.

    Args:
        file: contains the JPEG in [begin, end).
        begin: its first byte.
        end: one past its last byte.
        ignores_orientation: whether decoding ignores the orientation that Exif may give; else files with Exif are not
            plain.
    """
    if end - begin < 4 or _number(file, begin, 2) != 0xFFD8:
        return 0, 0, 0
    plain = 1 if _number(file, end - 2, 2) == 0xFFD9 else 0
    at = begin + 2
    while at + 10 <= end and file[at] == 0xFF:
        marker = np.int64(file[at + 1])
        if marker == 0xFF:
            at += 1
            continue
        length = _number(file, at + 2, 2)
        if marker >= _FIRST_FRAME and marker <= _LAST_FRAME and marker not in (_TABLES, _EXTENSION, _ARITHMETIC):
            height, width = _number(file, at + 5, 2), _number(file, at + 7, 2)
            if marker != _BASELINE or file[at + 4] != 8 or file[at + 9] != 3 or height == 0 or width == 0:
                plain = 0
            return height, width, plain
        if marker == _SCAN or length < 2:
            return 0, 0, 0
        if marker == _APP1 and not ignores_orientation and _number(file, at + 4, 4) == _EXIF:
            plain = 0
        adobe = marker == _APP14 and _number(file, at + 4, 4) == _ADOBE
        if adobe and (at + _TRANSFORM_AT >= end or file[at + _TRANSFORM_AT] != 1):
            plain = 0
        at += 2 + length
    return 0, 0, 0
