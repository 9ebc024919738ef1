"""Images are decoded and resized; damaged PNGs come to no decoder that believes their lengths."""

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
from hypothesis import given
from hypothesis import strategies as st
from image_files import files, jpeg, rotated, smooth_image, with_segment

from caffepy.data.images import decode_image, jpeg_size, resize_image, sanitize_png
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


# -- images ----------------------------------------------------------------------------------------------


def picture(channels):
    return np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)


def as_png(image):
    return cv2.imencode(".png", image)[1].tobytes()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_keep_their_channels(channels):
    image = picture(channels)
    np.testing.assert_array_equal(decode_image(as_png(image)), image.transpose(2, 0, 1))


def test_color_and_gray_are_forced():
    image = picture(3)
    assert decode_image(as_png(picture(1)), force_color=True).shape == (3, 5, 7)
    gray = decode_image(as_png(image), force_gray=True)
    np.testing.assert_array_equal(gray[0], cv2.imdecode(np.frombuffer(as_png(image), np.uint8), cv2.IMREAD_GRAYSCALE))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no image",
        b"\xff\xd8" + as_png(picture(3))[2:20],
        b"\x89PNG\r\n\x1a",
        b"\xff\xd8\xff",
        b"\xff\xd8" + b"\xff" * 50,
    ]
    + [jpeg(smooth_image(0))[:size] for size in (9, 14)],
)
def test_what_cannot_be_decoded(content):
    with pytest.raises(DataError, match=f"is an image of {len(content)} bytes that OpenCV cannot decode"):
        decode_image(content)


def test_sixteen_bits_are_too_many():
    with pytest.raises(DataError, match="is an image of uint16 values; Caffe reads 8 bits per channel"):
        decode_image(as_png(np.zeros((4, 4), np.uint16)))


@pytest.mark.parametrize("channels", [1, 3])
def test_resize(channels):
    image = np.full((channels, 6, 8), 50, np.uint8)
    assert (resize_image(image, 3, 5) == np.full((channels, 3, 5), 50)).all()


# -- sizes in the headers of JPEGs -----------------------------------------------------------------------


ADOBE = b"Adobe\0\x64\0\0\0\0"
PLAIN = jpeg(smooth_image(0, 17, 23))


def plain_jpeg_size(data: bytes | memoryview, ignores_orientation: bool = False) -> tuple[int, int] | None:
    """The size of a file between other bytes; None: it is not plain."""
    height, width, plain = jpeg_size(b"\xff\xd8" + bytes(data) + b"\xff\xd9", 2, 2 + len(data), ignores_orientation)
    return (height, width) if plain else None


@pytest.mark.parametrize("name", ["baseline", "subsampled", "not subsampled", "with restarts"])
def test_baseline_files_are_plain(name: str) -> None:
    assert plain_jpeg_size(files()[name]) == (40, 56)


@pytest.mark.parametrize("name", ["progressive", "rotated by Exif", "CMYK", "PNG", "BMP"])
def test_other_files_are_not(name: str) -> None:
    assert plain_jpeg_size(files()[name]) is None


def test_gray_files_are_not() -> None:
    assert plain_jpeg_size(jpeg(smooth_image(0, channels=1))) is None


def test_exif_counts_where_decoding_obeys_it() -> None:
    assert plain_jpeg_size(rotated(PLAIN), ignores_orientation=True) == (17, 23)
    assert plain_jpeg_size(with_segment(PLAIN, 0xE1, b"http://ns.adobe.com/xap/1.0/\0")) == (17, 23), "XMP"


def test_adobe_says_which_colors() -> None:
    assert plain_jpeg_size(with_segment(PLAIN, 0xEE, ADOBE + b"\1")) == (17, 23), "YCbCr"
    assert plain_jpeg_size(with_segment(PLAIN, 0xEE, ADOBE + b"\0")) is None, "RGB"


@given(st.integers(0, len(PLAIN) - 1))
def test_parts_of_a_file_are_not_plain(size: int) -> None:
    assert plain_jpeg_size(PLAIN[:size]) is None


@given(st.integers(2, 700), st.integers(0, 255))
def test_any_change_of_a_header_is_survived(at: int, value: int) -> None:
    changed = bytearray(PLAIN)
    changed[at % len(changed)] = value
    plain_jpeg_size(bytes(changed))
