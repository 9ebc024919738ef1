"""Draws a net: in the format that the file's name ends in, by Graphviz's dot where it is installed, else by us."""

from __future__ import annotations

import logging
from pathlib import Path

from caffepy.config.upgrade import upgrade_net
from caffepy.drawing.dot import dot_text, find_dot, run_dot
from caffepy.drawing.graph import Graph, make_graph
from caffepy.drawing.raster import rasterize
from caffepy.drawing.scene import make_scene
from caffepy.drawing.shapes import blob_shapes
from caffepy.drawing.svg import svg_text
from caffepy.errors import ConfigError, RunError
from caffepy.files import atomic_write
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)

RANKDIRS = ("LR", "RL", "TB", "BT")
FORMATS = ("svg", "png", "pdf", "dot", "gv", "raw")
"""raw, as Caffe calls it, is dot's language like dot and gv."""


def draw_net(
    net: caffe_pb2.NetParameter,
    path: Path | str,
    rankdir: str = "LR",
    phase: int | None = None,
    *,
    rates: bool = False,
    graphviz: bool = True,
) -> None:
    """Draw a net into a file.

    Args:
        net: the net; one of an older format is upgraded in a copy.
        path: the file; its ending is one of `FORMATS`.
        rankdir: where the net goes: LR (left to right), RL, TB (top to bottom) or BT.
        phase: draw the layers of this phase, caffe_pb2.TRAIN or TEST; None: those of all phases.
        rates: say the lr_mult of layers that learn.
        graphviz: use `dot` where it is installed.

    Raises:
        ConfigError: the ending or rankdir is unknown, the net does not hold together, or matplotlib is missing.
        RunError: the file cannot be written.
    """
    path = Path(path)
    picture = render_net(net, path.suffix.lstrip("."), rankdir, phase, rates=rates, graphviz=graphviz)
    with atomic_write(path) as file:
        file.write(picture)


def render_net(
    net: caffe_pb2.NetParameter,
    file_format: str,
    rankdir: str = "LR",
    phase: int | None = None,
    *,
    rates: bool = False,
    graphviz: bool = True,
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
    return _write(graph, file_format, rankdir, graphviz)


def _write(graph: Graph, file_format: str, rankdir: str, graphviz: bool) -> bytes:
    if file_format in ("dot", "gv", "raw"):
        return dot_text(graph, rankdir).encode()
    if graphviz and (program := find_dot()):
        try:
            return run_dot(program, dot_text(graph, rankdir), file_format)
        except RunError as error:
            log.warning("%s; the net is laid out without it", error)
    scene = make_scene(graph, rankdir)
    return svg_text(scene).encode() if file_format == "svg" else rasterize(scene, file_format)
