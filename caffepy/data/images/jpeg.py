"""The header of a JPEG file: finds the files that a decoder on the device may take; imported by batch_decoding.

Marker names and offsets follow ITU-T T.81, annex B, and JFIF's and Adobe's application segments.
"""

from __future__ import annotations

_BASELINE, _TABLES, _EXTENSION, _ARITHMETIC = 0xC0, 0xC4, 0xC8, 0xCC
_FRAMES = {*range(0xC0, 0xD0)} - {_TABLES, _EXTENSION, _ARITHMETIC}
_SCAN, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_TRANSFORM_AT = 15
"""Offset of the byte in Adobe's segment, from its marker, that is 1 for YCbCr."""


def plain_jpeg_size(data: bytes | memoryview, ignores_orientation: bool = False) -> tuple[int, int] | None:
    """Return height and width of a complete baseline JPEG with three channels, YCbCr, of 8 bits; None for other files.

    Args:
        data: the file's content.
        ignores_orientation: whether decoding ignores the orientation that Exif may give; else files with Exif are not
            plain.
    """
    end = len(data)
    if end < 4 or data[0] != 0xFF or data[1] != 0xD8 or data[end - 2] != 0xFF or data[end - 1] != 0xD9:
        return None
    at = 2
    while at + 10 <= end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if marker in _FRAMES:
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            plain = marker == _BASELINE and data[at + 4] == 8 and data[at + 9] == 3 and height and width
            return (height, width) if plain else None
        if marker == _SCAN or length < 2:
            return None
        if marker == _APP1 and not ignores_orientation and bytes(data[at + 4 : at + 8]) == b"Exif":
            return None
        adobe = marker == _APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe"
        if adobe and (at + _TRANSFORM_AT >= end or data[at + _TRANSFORM_AT] != 1):
            return None
        at += 2 + length
    return None
