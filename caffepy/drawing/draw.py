"""Writes the picture of a net: Graphviz's dot language, and the formats that Graphviz's program `dot` makes of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from html import escape
from pathlib import Path

from caffepy.config.upgrade import upgrade_net
from caffepy.drawing.graph import Box, Graph, make_graph
from caffepy.drawing.shapes import blob_shapes
from caffepy.errors import ConfigError, RunError
from caffepy.files import atomic_write
from caffepy.proto import caffe_pb2

RANKDIRS = ("LR", "RL", "TB", "BT")
DOT_FORMATS = ("dot", "gv", "raw")
"""Endings of files in the dot language; raw is pydot's name."""
FORMATS = ("svg", "png", "pdf", *DOT_FORMATS)
TIMEOUT = 120
"""Seconds for one run of `dot`; the layout of a net with thousands of layers takes minutes."""


def draw_net(
    net: caffe_pb2.NetParameter,
    path: Path | str,
    rankdir: str = "LR",
    phase: int | None = None,
    *,
    rates: bool = False,
) -> None:
    """Draw a net into a file.

    Args:
        net: the net; one of an older format is upgraded in a copy.
        path: the file; its ending is one of `FORMATS`.
        rankdir: where the net goes: LR (left to right), RL, TB (top to bottom) or BT.
        phase: draw the layers of this phase, caffe_pb2.TRAIN or TEST; None: those of all phases.
        rates: say the lr_mult of layers that learn.

    Raises:
        ConfigError: the ending or rankdir is unknown, the net does not hold together, or Graphviz is not installed.
        RunError: `dot` fails, or the file cannot be written.
    """
    path = Path(path)
    picture = render_net(net, path.suffix.lstrip("."), rankdir, phase, rates=rates)
    with atomic_write(path) as file:
        file.write(picture)


def render_net(
    net: caffe_pb2.NetParameter,
    file_format: str,
    rankdir: str = "LR",
    phase: int | None = None,
    *,
    rates: bool = False,
) -> bytes:
    """The bytes of a picture's file; the arguments and errors are those of `draw_net`."""
    file_format, rankdir = file_format.lower(), rankdir.upper()
    if file_format not in FORMATS:
        raise ConfigError(f"pictures of nets end in .{', .'.join(FORMATS)}, not in '.{file_format}'; name another file")
    if rankdir not in RANKDIRS:
        raise ConfigError(f"rankdir is {' or '.join(RANKDIRS)}, not '{rankdir}'")
    upgraded = caffe_pb2.NetParameter()
    upgraded.CopyFrom(net)
    upgrade_net(upgraded, net.name or "net")
    if not upgraded.layer:
        raise ConfigError("the net has no layers; give the prototxt of a net")
    graph = make_graph(upgraded, phase, blob_shapes(upgraded, phase), rates)
    text = dot_text(graph, rankdir).encode()
    return text if file_format in DOT_FORMATS else run_dot(text, file_format)


def dot_text(graph: Graph, rankdir: str) -> str:
    """The net in the dot language. Names appear in escaped labels only; nodes are numbered."""
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


def run_dot(text: bytes, file_format: str) -> bytes:
    """The picture that Graphviz's `dot` makes of a text in its language.

    Raises:
        ConfigError: Graphviz is not installed.
        RunError: `dot` fails or takes longer than `TIMEOUT`.
    """
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"a .{file_format} file needs Graphviz's program 'dot', which is not installed: install Graphviz (on "
            "Debian and Ubuntu: apt-get install graphviz), or write a .dot file"
        )
    try:
        done = subprocess.run([program, f"-T{file_format}"], input=text, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RunError(f"{program} did not finish within {TIMEOUT} s: write a .dot file") from None
    except OSError as error:
        raise RunError(f"{program} cannot be run: {error.strerror or error}") from error
    if done.returncode or not done.stdout:
        message = done.stderr.decode(errors="replace").strip()
        raise RunError(f"{program} failed with status {done.returncode}: {message[:500]}")
    return done.stdout
