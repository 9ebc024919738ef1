"""Tables as HTML, for notebooks; every text is escaped, because names come from files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = "text-align: left; padding: 1px 8px;"


def heading(text: str) -> str:
    """A line in bold."""
    return f"<p><b>{escape(text)}</b></p>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a row of titles."""
    lines = [_row("th", header), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    written = (f"<{tag} style='{_STYLE}'>{escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{''.join(written)}</tr>"
