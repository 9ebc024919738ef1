"""Tables on stdout: aligned columns that fit the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from caffepy.errors import printable

_GAP = "  "
_NARROWEST = 8
"""Columns are not shortened below this width."""


def print_table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), shrinking: Sequence[int] = ()) -> None:
    """Print rows with aligned columns.

    Args:
        rows: the cells of each row.
        right: columns that are aligned right.
        shrinking: columns whose texts may be shortened to fit the terminal. If stdout is no terminal nothing is.
    """
    for line in format_table(rows, right, shrinking, _terminal_width()):
        print(line)


def format_table(
    rows: Iterable[Sequence[str]], right: Sequence[int], shrinking: Sequence[int], width: int | None
) -> list[str]:
    """Return the lines of a table, none longer than `width` if its columns can be made so narrow; None: any width."""
    table = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if width is not None:
        _narrow(widths, shrinking, width - len(_GAP) * (len(widths) - 1))
    lines = []
    for row in table:
        cells = (
            _shortened(text, size).rjust(size) if column in right else _shortened(text, size).ljust(size)
            for column, (text, size) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(_GAP.join(cells).rstrip())
    return lines


def _narrow(widths: list[int], shrinking: Sequence[int], room: int) -> None:
    """Narrow the widest of the columns `shrinking` until all columns fit into `room`."""
    while sum(widths) > room:
        widest = max(shrinking, key=lambda column: widths[column], default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def _shortened(text: str, size: int) -> str:
    """Return a text with its middle left out if it is longer than `size`."""
    if len(text) <= size:
        return text
    kept = size - 1
    return f"{text[: kept - kept // 2]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - kept // 2 :]}"


def _terminal_width() -> int | None:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # no terminal
        return None
