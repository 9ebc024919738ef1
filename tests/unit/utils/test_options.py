"""Whole numbers in texts of others."""

from __future__ import annotations

import pytest

from caffepy.utils.options import LARGEST, whole


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("007", 7), ("+5", 5), (b"12", 12), (str(LARGEST), LARGEST), ("-0", 0)]
)
def test_a_whole_number_is_read(text: str | bytes, number: int) -> None:
    assert whole(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "-",
        "--5",
        "+-3",
        "-1",
        "²",
        "٣",
        "1.0",
        "1e3",
        "1_0",
        " 1",
        "0x1",
        str(LARGEST + 1),
        "9" * 5000,
        b"\xff",
    ],
)
def test_other_texts_are_none(text: str | bytes) -> None:
    assert whole(text) is None


def test_bounds() -> None:
    assert [whole(str(number), -1, 1) for number in (-2, -1, 1, 2)] == [None, -1, 1, None]
