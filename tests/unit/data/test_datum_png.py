"""Damaged PNGs are refused before they come to a decoder that believes their lengths."""

from __future__ import annotations

import random
import resource
import struct
import time
import zlib

import cv2
import numpy as np
import pytest
from fuzz.mutate import damage_bytes

from caffepy.data.datum import decode_image, sanitize_png
from caffepy.errors import DataError

HEAD = struct.pack(">2I5B", 4, 3, 8, 2, 0, 0, 0)
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 4, 3), dtype=np.uint8)
STREAM = zlib.compress(b"".join(b"\0" + row[:, ::-1].tobytes() for row in PIXELS))


def chunk(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


IHDR, IDAT, IEND = chunk(b"IHDR", HEAD), chunk(b"IDAT", STREAM), chunk(b"IEND")


@pytest.mark.parametrize(
    "data",
    [
        png(IHDR, IDAT, IEND),
        png(IHDR, chunk(b"IDAT", STREAM[:1]), chunk(b"IDAT", STREAM[1:]), IEND, b"behind its end"),
        png(IHDR, chunk(b"tEXt", b"Comment\0x"), chunk(b"acTL", b"\xff" * 8), IDAT, chunk(b"fdAT", b"\xff" * 9), IEND),
        png(IHDR, chunk(b"tEXt", b"Comment\0x")[:-1] + b"?", IDAT, IEND),
    ],
    ids=["plain", "two chunks", "animated", "a text with a wrong checksum"],
)
def test_valid_files_are_decoded(data: bytes) -> None:
    np.testing.assert_array_equal(decode_image(data).transpose(1, 2, 0), PIXELS)


def test_chunks_that_do_not_affect_pixels_are_dropped() -> None:
    plain = png(IHDR, IDAT, IEND)
    assert sanitize_png(plain) is plain
    assert sanitize_png(png(IHDR, chunk(b"acTL", bytes(8)), IDAT, IEND)) == plain


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(IHDR, IDAT), "it ends before IEND"),
        (
            png(IHDR, struct.pack(">I", 2**32 - 2**20) + IDAT[4:], IEND),
            "a chunk of 4293918720 bytes exceeds the file",
        ),
        (png(IHDR[:-1] + b"?", IDAT, IEND), "the CRC of IHDR is wrong"),
        (png(chunk(b"tEXt", bytes(9)), IHDR, IDAT, IEND), "it does not begin with IHDR"),
        (png(IHDR, IHDR, IDAT, IEND), "IHDR is misplaced"),
        (png(chunk(b"IHDR", HEAD + b"0"), IDAT, IEND), "IHDR is misplaced"),
        (png(chunk(b"IHDR", struct.pack(">2I5B", 4, 0, 8, 2, 0, 0, 0)), IDAT, IEND), "IHDR has an invalid size"),
        (png(chunk(b"IHDR", struct.pack(">2I5B", 4, 3, 8, 5, 0, 0, 0)), IDAT, IEND), "IHDR has an invalid size"),
        (png(chunk(b"IHDR", struct.pack(">2I5B", 4, 3, 8, 2, 0, 0, 2)), IDAT, IEND), "IHDR has an invalid size"),
        (png(IHDR, IEND), "it has no IDAT"),
        (png(IHDR, chunk(b"IDAT", b"no zlib"), IEND), "IDAT is not a zlib stream"),
        (png(IHDR, IDAT, chunk(b"tEXt"), IDAT, IEND), "its IDAT chunks are not consecutive"),
        (png(IHDR, chunk(b"IDAX"), IDAT, IEND), "it has an unknown critical chunk"),
    ],
)
def test_damaged_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^is a damaged PNG: {message}.*; replace it$"):
        decode_image(data)


def test_a_png_from_which_the_decoder_did_not_come_back() -> None:
    """Its second chunk says that it has 4 GB."""
    data = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000004000000040802000000269301fff100003f49444154081d013400cbff01c2825f294d7a36"
        "d4370036c80156bfed9248a264e8d1fb11d7f4951238560edc062cff8ada1d0113c53ff3918f27a54a342d5957a61626de397e73000000"
        "0049454e44ae4200ff"
    )
    with pytest.raises(DataError, match="is a damaged PNG"):
        decode_image(data)


def repaired(data: bytes) -> bytes:
    """The file with the right checksum in each chunk, as an attacker would write it."""
    result, at = bytearray(data), 8
    while at + 12 <= len(result):
        end = at + 12 + struct.unpack_from(">I", result, at)[0]
        if end > len(result):
            break
        struct.pack_into(">I", result, end - 4, zlib.crc32(result[at + 4 : end - 4]))
        at = end
    return bytes(result)


def test_mutated_files_neither_hang_nor_take_memory() -> None:
    rows = np.zeros((200, 200, 3), np.uint8)
    files = [cv2.imencode(kind, image)[1].tobytes() for kind in (".png", ".jpg") for image in (rows, PIXELS)]
    files.append(png(IHDR, chunk(b"acTL", struct.pack(">2I", 1, 0)), IDAT, IEND))
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for seed in range(1500):
        data = damage_bytes(files[seed % len(files)], files, random.Random(seed))
        started = time.perf_counter()
        try:
            decode_image(repaired(data) if seed % 2 and data[1:4] == b"PNG" else data)
        except DataError:
            refused += 1
        assert time.perf_counter() - started < 60, seed
    assert refused > 500
    # KiB; 2^26 pixels of three bytes are allowed.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19
