"""Parts of an image on a canvas are those of the whole canvas, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.images import recompress
from caffepy.data.transforms.canvas import Canvas, canvas_part, surround


def noise(seed: int, channels: int, height: int, width: int, dtype: str = "uint8") -> np.ndarray:
    """An image without any smoothness: JPEG changes each of its pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels))
    return values.astype(dtype).transpose(2, 0, 1)


def whole(image: np.ndarray, canvas: Canvas, color: np.ndarray) -> np.ndarray:
    """The canvas as it is drawn at once."""
    drawn = np.empty((canvas.rows, canvas.columns, image.shape[0]), image.dtype).transpose(2, 0, 1)
    drawn[...] = color.astype(image.dtype)[:, None, None]
    drawn[:, canvas.top : canvas.top + image.shape[1], canvas.left : canvas.left + image.shape[2]] = image
    return drawn


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 3]), st.integers(1, 60), st.integers(1, 60))
def test_compressed_parts_are_those_of_the_whole(data: st.DataObject, channels: int, height: int, width: int) -> None:
    rows, columns = data.draw(st.integers(height, 150)), data.draw(st.integers(width, 150))
    canvas = Canvas(rows, columns, data.draw(st.integers(0, rows - height)), data.draw(st.integers(0, columns - width)))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    part = (top, left, data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left)))
    image, color = noise(height, channels, height, width), np.array([104.0, 117.0, 123.0])[:channels]
    expected = recompress(whole(image, canvas, color))[:, top : top + part[2], left : left + part[3]]
    np.testing.assert_array_equal(canvas_part(image, canvas, color, part, True), expected)


@pytest.mark.parametrize(("channels", "dtype"), [(1, "uint8"), (3, "float32"), (7, "uint8")])
@pytest.mark.parametrize("part", [(0, 0, 20, 30), (5, 6, 3, 4), (0, 0, 2, 3), (12, 0, 8, 30)])
def test_uncompressed_parts_are_those_of_the_whole(channels: int, dtype: str, part: tuple[int, int, int, int]) -> None:
    image, canvas, color = noise(0, channels, 7, 9, dtype), Canvas(20, 30, 4, 5), np.arange(channels) + 11.0
    top, left, rows, columns = part
    expected = whole(image, canvas, color)[:, top : top + rows, left : left + columns]
    found = canvas_part(image, canvas, color, part, False)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == image.dtype


def test_borders() -> None:
    surrounded = surround(noise(0, 3, 2, 3), (1, 0, 0, 2), np.array([1.0, 2.0, 3.0]))
    assert surrounded.shape == (3, 3, 5)
    assert surrounded[:, 0, 0].tolist() == surrounded[:, 2, 4].tolist() == [1, 2, 3]
