"""Datums and their encoded images."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import files, jpeg, rotated, smooth_image, with_segment

from caffepy.data import datum as headers
from caffepy.data import datum as module
from caffepy.data.datum import datum_shape, decode_image, parse_datum, resize_image
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import Datum


@given(
    size=st.sampled_from([0, 1, 127, 128, 300, 16380, 20000]), label=st.integers(-5, 2**31 - 1), encoded=st.booleans()
)
def test_data_and_all_else_come_out_of_small_and_large_records(size, label, encoded):
    written = Datum(channels=3, height=2, width=size, data=bytes(range(256)) * 80, label=label, encoded=encoded)
    written.data = written.data[:size]
    datum, data = parse_datum(memoryview(written.SerializeToString()))
    assert bytes(data) == written.data
    datum.data = written.data
    assert datum == written


def test_large_data_are_not_copied():
    record = Datum(channels=1, height=200, width=200, data=bytes(40000)).SerializeToString()
    assert isinstance(parse_datum(record)[1], memoryview)


@settings(max_examples=50)
@given(st.binary(max_size=50), st.integers(0, 2))
def test_any_bytes_give_a_datum_or_an_error(content, padding):
    for record in (
        content,
        content + b"\0" * padding * module.VIEW_MIN_BYTES,
        b"\x08" * padding * module.VIEW_MIN_BYTES + content,
    ):
        try:
            parse_datum(record)
        except DataError as error:
            assert str(error).startswith("is not a Datum (")


def test_what_is_no_datum_is_refused():
    with pytest.raises(DataError, match=r"is not a Datum \(.*\); rebuild the database"):
        parse_datum(b"\xff\xff\xff")


@pytest.mark.parametrize("shape", [(1, 2, 3), (0, 2, 3), (-1, -2, 3), (65536, 65536, 65536)])
def test_shapes_must_fit_the_values(shape):
    datum = Datum(channels=shape[0], height=shape[1], width=shape[2])
    with pytest.raises(DataError, match=r"is a Datum of 7 bytes, but its channels x height x width is -?\d+ x "):
        datum_shape(datum, 7, "bytes")


# -- images ----------------------------------------------------------------------------------------------


def picture(channels):
    return np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)


def png(image):
    return cv2.imencode(".png", image)[1].tobytes()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_keep_their_channels(channels):
    image = picture(channels)
    np.testing.assert_array_equal(decode_image(png(image)), image.transpose(2, 0, 1))


def test_color_and_gray_are_forced():
    image = picture(3)
    assert decode_image(png(picture(1)), force_color=True).shape == (3, 5, 7)
    gray = decode_image(png(image), force_gray=True)
    np.testing.assert_array_equal(gray[0], cv2.imdecode(np.frombuffer(png(image), np.uint8), cv2.IMREAD_GRAYSCALE))


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8" + png(picture(3))[2:20]])
def test_what_cannot_be_decoded(content):
    with pytest.raises(DataError, match=f"is an image of {len(content)} bytes that OpenCV cannot decode"):
        decode_image(content)


def test_sixteen_bits_are_too_many():
    with pytest.raises(DataError, match="is an image of uint16 values; Caffe reads 8 bits per channel"):
        decode_image(png(np.zeros((4, 4), np.uint16)))


@pytest.mark.parametrize("channels", [1, 3])
def test_resize(channels):
    image = np.full((channels, 6, 8), 50, np.uint8)
    assert (resize_image(image, 3, 5) == np.full((channels, 3, 5), 50)).all()


# -- sizes in the headers of JPEGs -----------------------------------------------------------------------


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
