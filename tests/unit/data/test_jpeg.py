from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import files, jpeg, rotated, smooth_image, with_segment

from caffepy.data import datum as headers

ADOBE = b"Adobe\0\x64\0\0\0\0"
PLAIN = jpeg(smooth_image(0, 17, 23))


def plain_jpeg_size(data: bytes | memoryview, ignores_orientation: bool = False) -> tuple[int, int] | None:
    """The size of a file between other bytes; None: it is not plain."""
    height, width, plain = headers.jpeg_size(
        b"\xff\xd8" + bytes(data) + b"\xff\xd9", 2, 2 + len(data), ignores_orientation
    )
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
