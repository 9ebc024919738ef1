"""Writes a scene as PNG or PDF, by matplotlib."""

from __future__ import annotations

import io

from caffepy.drawing.scene import Scene
from caffepy.errors import ConfigError

_DOTS = 72
"""Pixels of an inch, so that a font's points are pixels."""
_SCALE = 1.5
"""Pixels of a PNG for one of the scene."""
_LARGEST = 2**15
"""Pixels of a side; matplotlib draws fewer than 2**16."""
_MOST = 2**28
"""Pixels of a picture: 1 GiB while it is drawn."""


def rasterize(scene: Scene, file_format: str) -> bytes:
    """The picture's file.

    Args:
        scene: what to draw.
        file_format: png or pdf.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PathCollection, PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.path import Path
    except ImportError as error:
        raise ConfigError(
            f"a .{file_format} picture needs Graphviz's dot, or matplotlib: pip install 'caffepy[plot]' "
            "(an .svg needs neither)"
        ) from error
    figure = Figure(figsize=(scene.width / _DOTS, scene.height / _DOTS), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    curves = [Path(curve, [Path.MOVETO, *[Path.CURVE4] * (len(curve) - 1)]) for curve in scene.curves]
    axes.add_collection(PathCollection(curves, facecolors="none", edgecolors="#606060", linewidths=1), autolim=False)
    axes.add_collection(PolyCollection(scene.arrows, facecolors="#606060"), autolim=False)
    outlines = [outline for outline, _ in scene.fills]
    colours = [colour for _, colour in scene.fills]
    axes.add_collection(PolyCollection(outlines, facecolors=colours, edgecolors="#303030", linewidths=1), autolim=False)
    for text in scene.texts:
        axes.text(
            text.x, text.y, text.text, fontsize=text.size * 0.93, weight="bold" if text.bold else "normal",
            horizontalalignment="center" if text.centred else "left", verticalalignment="baseline",
            parse_math=False, family=["DejaVu Sans"],
        )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, dpi=_DOTS * _scale(scene))
    return buffer.getvalue()


def _scale(scene: Scene) -> float:
    """Pixels for one of the scene: fewer where the picture would become too large."""
    side = _LARGEST / max(scene.width, scene.height)
    area = (_MOST / (scene.width * scene.height)) ** 0.5
    return float(min(_SCALE, side, area))
