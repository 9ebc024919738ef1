"""Writes a scene as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from caffepy.drawing.scene import Point, Scene, Text

FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


def svg_text(scene: Scene) -> str:
    """The SVG file; it has no scripts, links or styles from elsewhere."""
    size = f'width="{scene.width:.0f}" height="{scene.height:.0f}" viewBox="0 0 {scene.width:.0f} {scene.height:.0f}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
        f"<title>{escape(scene.title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        *_shapes(scene),
        *map(_text, scene.texts),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _shapes(scene: Scene) -> Iterator[str]:
    yield '<g fill="none" stroke="#606060">'
    for curve in scene.curves:
        first, *rest = map(_point, curve)
        yield f'<path d="M{first}C{" ".join(rest)}"/>'
    yield '</g>\n<g fill="#606060">'
    for arrow in scene.arrows:
        yield f'<polygon points="{_points(arrow)}"/>'
    yield '</g>\n<g stroke="#303030">'
    for outline, colour in scene.fills:
        yield f'<polygon points="{_points(outline)}" fill="{colour}"/>'
    yield "</g>"


def _text(text: Text) -> str:
    anchor = ' text-anchor="middle"' if text.centred else ""
    weight = ' font-weight="bold"' if text.bold else ""
    place = f'x="{text.x:.1f}" y="{text.y:.1f}" font-size="{text.size:g}"'
    return f"<text {place}{anchor}{weight}>{escape(text.text)}</text>"


def _points(points: Sequence[Point]) -> str:
    return " ".join(map(_point, points))


def _point(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"
