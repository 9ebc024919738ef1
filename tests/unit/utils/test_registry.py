"""Suggestions for names that are misspelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.utils.registry import nearest, suggest

LETTERS = "abcdefghijklmnopqrstuvwxyz_"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("BN", "BNLL"),
        ("FocalLoss", "L1Loss"),
        ("stagelr", "stepvalue"),
        ("Correlation", "Convolution"),
        ("Region", "Reduction"),
        ("x" * 10_000, "x" * 10_000),
        ("", "a"),
    ],
)
def test_other_words_are_not_taken_for_misspellings(name: str, known: str) -> None:
    assert nearest(name, [known]) is None
    assert suggest(name, [known, "other"]) == f"known: {', '.join(sorted([known, 'other']))}"


@pytest.mark.parametrize("name", ["Relu", "ReLUU", "RLU", "RleU", "rElU", "-relu"])
def test_a_misspelling(name: str) -> None:
    assert suggest(name, ["ReLU", "Power"]) == "did you mean 'ReLU'?"


def test_the_nearest_of_several() -> None:
    assert nearest("kernel_hh", ["kernel_w", "kernel_h", "kernel"]) == "kernel_h"


@given(st.text(LETTERS, min_size=4, max_size=30), st.data())
def test_one_error_is_found(word: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(word) - 1))
    letter = data.draw(st.sampled_from(LETTERS))
    ways = [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]]
    ways.append(word[:at] + word[at : at + 2][::-1] + word[at + 2 :])
    assert nearest(data.draw(st.sampled_from(ways)), [word]) == word
