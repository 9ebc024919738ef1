"""Writes a net in Graphviz's language, and has its program `dot` draw it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from html import escape

from caffepy.drawing.graph import Box, Graph
from caffepy.errors import RunError

_SECONDS = 120
"""Longest time that `dot` gets; its layout takes minutes for nets of thousands of layers."""


def dot_text(graph: Graph, rankdir: str) -> str:
    """The net in dot's language; names are in labels alone, escaped, and nodes are numbered."""
    lines = [
        "digraph net {",
        f"  graph [rankdir={rankdir}, label={_html(graph.name)}, labelloc=t, labeljust=l];",
        '  node [shape=plain, fontname="Helvetica", fontsize=11];',
        '  edge [fontname="Helvetica", fontsize=10, color="#606060"];',
        *(f"  n{index} [{_node(box)}];" for index, box in enumerate(graph.boxes)),
        *_edges(graph),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _edges(graph: Graph) -> Iterator[str]:
    for edge in graph.edges:
        label = f" [label={_html(edge.label)}]" if edge.label else ""
        yield f"  n{edge.source} -> n{edge.target}{label};"


def _node(box: Box) -> str:
    if box.is_blob:
        lines = "<BR/>".join(escape(line) for line in box.rows[0].lines)
        return f'label=<{lines}>, shape=octagon, style=filled, fillcolor="{box.rows[0].colour}"'
    rows = "".join(f'<TR><TD BGCOLOR="{row.colour}">{_lines(row.lines)}</TD></TR>' for row in box.rows)
    return f'label=<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="4">{rows}</TABLE>>'


def _lines(lines: tuple[str, ...]) -> str:
    name, *rest = (escape(line) for line in lines)
    return "<BR/>".join([f"<B>{name}</B>" if name else "", *rest])


def _html(text: str) -> str:
    return f"<{escape(text)}>" if text else '""'


def find_dot() -> str | None:
    """The path of Graphviz's `dot`, if it is installed."""
    return shutil.which("dot")


def run_dot(program: str, text: str, file_format: str) -> bytes:
    """The picture that `dot` draws.

    Raises:
        RunError: it fails, or takes too long.
    """
    command = [program, f"-T{file_format}"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"{program} did not finish within {_SECONDS} s") from None
    except OSError as error:
        raise RunError(f"{program} cannot be run: {error.strerror or error}") from error
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip()
        raise RunError(f"{program} failed with status {done.returncode}: {said[:500]}")
    return done.stdout
