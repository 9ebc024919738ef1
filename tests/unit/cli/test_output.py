"""Tables that fit the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caffepy.cli.output import format_table

CELLS = st.lists(st.lists(st.text("abc ", max_size=40), min_size=3, max_size=3), min_size=1, max_size=5)


@given(rows=CELLS, width=st.integers(45, 120))
def test_lines_fit_and_short_cells_stay(rows: list[list[str]], width: int) -> None:
    lines = format_table(rows, (2,), (0, 1, 2), width)
    assert len(lines) == len(rows)
    assert max(map(len, lines)) <= width
    if all(len(cell) <= 8 for row in rows for cell in row):
        assert lines == format_table(rows, (2,), (), None)


def test_the_middle_of_a_long_cell_is_left_out() -> None:
    assert format_table([["abcdefghijklmnopq", "number"]], (), (0,), 21) == ["abcdef…lmnopq  number"]


def test_other_columns_keep_their_text() -> None:
    wide = ["x" * 50, "y" * 50]
    (line,) = format_table([wide], (), (0,), 70)
    assert line.endswith("y" * 50)
    assert "…" in line
    assert format_table([wide], (), (), 70) == ["  ".join(wide)]
