"""A laid out net as rectangles, polygons, curves and texts in pixels, for whatever writes the picture."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from caffepy.drawing.graph import Box, Edge, Graph
from caffepy.drawing.layered import Layout, lay_out

Point = tuple[float, float]

FONT_SIZE, SMALL_SIZE = 11.0, 10.0
LINE_HEIGHT = 14.0
_CHARACTER = 0.61
"""Mean width of a character by its height, of the wider of the usual sans-serif fonts."""
_PADDING = 8.0
_MARGIN = 20.0
_SPACING = 26.0
_PORT = 15.0
"""Between two edges at one side of a box."""
_CURVE = 40.0
_LONGEST_CURVE = 160.0
_ARROW = 7.0


@dataclass(frozen=True)
class Text:
    """A line of text, its baseline at y.

    Args:
        x: of the middle, or of the beginning.
        y: of the baseline.
        text: one line.
        size: of the font, in pixels.
        bold: whether it is.
        centred: whether x is the middle.
    """

    x: float
    y: float
    text: str
    size: float = FONT_SIZE
    bold: bool = False
    centred: bool = True


@dataclass
class Scene:
    """What is drawn, from the back to the front.

    Args:
        title: the net's name.
        width: in pixels.
        height: in pixels.
        curves: edges: a point, and then three for each Bézier curve that goes on from there.
        arrows: triangles at their ends.
        fills: polygons with the colour that fills them.
        texts: on top.
    """

    title: str
    width: float = 0.0
    height: float = 0.0
    curves: list[list[Point]] = field(default_factory=list)
    arrows: list[list[Point]] = field(default_factory=list)
    fills: list[tuple[list[Point], str]] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)


def text_width(text: str, size: float = FONT_SIZE, bold: bool = False) -> float:
    """The room that a text needs in about any font."""
    columns = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
    return columns * size * _CHARACTER * (1.08 if bold else 1.0)


def make_scene(graph: Graph, rankdir: str) -> Scene:
    """Lay a net out.

    Args:
        graph: the net.
        rankdir: where it goes: LR, RL, TB or BT, the sides named by their first letters.

    Raises:
        ConfigError: it is too large.
    """
    return _Painter(graph, rankdir).paint()


class _Painter:
    """Gives boxes and edges their pixels."""

    def __init__(self, graph: Graph, rankdir: str) -> None:
        self._graph = graph
        self._sideways = rankdir in ("LR", "RL")
        self._backwards = rankdir in ("RL", "BT")
        self._scene = Scene(graph.name)
        self._sizes = self._box_sizes()
        breadths = [size[1 if self._sideways else 0] for size in self._sizes]
        self._depths = [size[0 if self._sideways else 1] for size in self._sizes]
        self._layout: Layout = lay_out(breadths, [(e.source, e.target) for e in graph.edges], _SPACING)
        self._breadths = breadths
        self._starts, self._ends, self._total = self._rank_depths()

    def paint(self) -> Scene:
        """The scene."""
        breadth = self._layout.breadth + 2 * _MARGIN
        title = text_width(self._graph.name, 1.3 * FONT_SIZE, bold=True) + 2 * _MARGIN
        scene = self._scene
        size = (self._total, breadth) if self._sideways else (breadth, self._total)
        scene.width, scene.height = max(size[0], title), size[1] + 1.5 * LINE_HEIGHT
        leaving, arriving = self._leaving_ports(), self._arriving_ports()
        for index, edge in enumerate(self._graph.edges):
            self._paint_edge(index, edge, leaving[edge.source, edge.blob], arriving[index])
        self._paint_labels(leaving)
        for index, box in enumerate(self._graph.boxes):
            self._paint_box(index, box)
        scene.texts.append(Text(_MARGIN, 1.6 * LINE_HEIGHT, self._graph.name, 1.3 * FONT_SIZE, True, False))
        return scene

    # -- sizes ---------------------------------------------------------------------------------------------

    def _box_sizes(self) -> list[Point]:
        """Width and height of each box: of its text, and of the edges at its sides."""
        into: defaultdict[int, int] = defaultdict(int)
        out: defaultdict[int, set[int]] = defaultdict(set)
        for edge in self._graph.edges:
            into[edge.target] += 1
            out[edge.source].add(edge.blob)
        sizes = []
        for index, box in enumerate(self._graph.boxes):
            width, height = _text_size(box)
            ports = _PORT * (max(into[index], len(out[index])) + 1)
            sizes.append((width, max(height, ports)) if self._sideways else (max(width, ports), height))
        return sizes

    def _rank_depths(self) -> tuple[list[float], list[float], float]:
        """Where each rank begins and ends, and the depth of the picture."""
        ranks = max(self._layout.rank, default=-1) + 1
        extents, gaps = [0.0] * ranks, [0.0] * ranks
        for box, rank in enumerate(self._layout.rank):
            extents[rank] = max(extents[rank], self._depths[box])
        for rank, room in enumerate(self._rooms_for_labels(ranks)):
            gaps[rank] = room + self._curve_depth(rank)
        top = _MARGIN if self._sideways else _MARGIN + 1.5 * LINE_HEIGHT
        begins = list(accumulate((e + g for e, g in zip(extents, gaps, strict=True)), initial=top))
        ends = [begin + extent for begin, extent in zip(begins, extents, strict=False)]
        return begins[:ranks], ends, (ends[-1] if ends else 0.0) + _MARGIN

    def _rooms_for_labels(self, ranks: int) -> list[float]:
        rooms = [0.0] * ranks
        for edge in self._graph.edges:
            rank = self._layout.rank[edge.source]
            wanted = text_width(edge.label, SMALL_SIZE) + 6 if self._sideways else (edge.blob % 3 + 1) * LINE_HEIGHT
            rooms[rank] = max(rooms[rank], wanted if edge.label else 0.0)
        return rooms

    def _curve_depth(self, rank: int) -> float:
        """Depth for the curves behind a rank: more where they go far across."""
        across = 0.0
        for index, edge in enumerate(self._graph.edges):
            step = rank - self._layout.rank[edge.source]
            way = self._whole_way(index, edge)
            if 0 <= step < len(way) - 1:
                across = max(across, abs(way[step + 1] - way[step]))
        return min(max(_CURVE, across / 5), _LONGEST_CURVE)

    def _whole_way(self, index: int, edge: Edge) -> list[float]:
        centre = self._layout.centre
        return [centre[edge.source], *self._layout.ways[index], centre[edge.target]]

    # -- edges ---------------------------------------------------------------------------------------------

    def _leaving_ports(self) -> dict[tuple[int, int], float]:
        """The breadth at which each blob leaves its box."""
        towards: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for index, edge in enumerate(self._graph.edges):
            towards[edge.source][edge.blob].append(self._whole_way(index, edge)[1])
        ports: dict[tuple[int, int], float] = {}
        for box, blobs in towards.items():
            order = sorted(blobs, key=lambda blob: sum(blobs[blob]) / len(blobs[blob]))
            ports.update(zip(((box, blob) for blob in order), self._spread(box, len(order)), strict=True))
        return ports

    def _arriving_ports(self) -> list[float]:
        """The breadth at which each edge reaches its target."""
        arriving: defaultdict[int, list[int]] = defaultdict(list)
        for index, edge in enumerate(self._graph.edges):
            arriving[edge.target].append(index)
        ports = [0.0] * len(self._graph.edges)
        for box, edges in arriving.items():
            edges.sort(key=lambda index: self._whole_way(index, self._graph.edges[index])[-2])
            for index, port in zip(edges, self._spread(box, len(edges)), strict=True):
                ports[index] = port
        return ports

    def _spread(self, box: int, ports: int) -> list[float]:
        low = self._layout.centre[box] - self._breadths[box] / 2
        return [low + self._breadths[box] * (port + 1) / (ports + 1) for port in range(ports)]

    def _depth_of(self, box: int) -> tuple[float, float]:
        """Where a box begins and ends: in the middle of its rank."""
        rank = self._layout.rank[box]
        middle = (self._starts[rank] + self._ends[rank]) / 2
        return middle - self._depths[box] / 2, middle + self._depths[box] / 2

    def _paint_edge(self, index: int, edge: Edge, leaving: float, arriving: float) -> None:
        """Straight through ranks, curved between them."""
        rank = self._layout.rank[edge.source]
        target = self._depth_of(edge.target)[0]
        breadths = [leaving, *self._layout.ways[index], arriving]
        points = [(self._depth_of(edge.source)[1], leaving)]
        for step, (here, there) in enumerate(zip(breadths, breadths[1:], strict=False)):
            end = self._starts[rank + step + 1]
            begin = end - self._curve_depth(rank + step)
            half = (begin + end) / 2
            points += _straight(points[-1], (begin, here))
            points += [(half, here), (half, there), (end, there)]
        points += _straight(points[-1], (target - _ARROW, arriving))
        self._scene.curves.append([self._to_screen(*point) for point in points])
        head = [(target, arriving), (target - _ARROW, arriving - 3.5), (target - _ARROW, arriving + 3.5)]
        self._scene.arrows.append([self._to_screen(*point) for point in head])

    def _paint_labels(self, leaving: dict[tuple[int, int], float]) -> None:
        """Each blob's label, once, beside the beginning of its edges."""
        labels = {(edge.source, edge.blob): edge.label for edge in self._graph.edges if edge.label}
        for (box, blob), label in labels.items():
            depth = self._depth_of(box)[1]
            if self._sideways:
                x, y = self._to_screen(depth, leaving[box, blob])
                x -= text_width(label, SMALL_SIZE) + 4 if self._backwards else -4
                self._scene.texts.append(Text(x, y - 3, label, SMALL_SIZE, centred=False))
            else:
                x, y = self._to_screen(depth + (blob % 3 + 1) * LINE_HEIGHT, leaving[box, blob])
                y += LINE_HEIGHT if self._backwards else 0
                self._scene.texts.append(Text(x + 4, y, label, SMALL_SIZE, centred=False))

    # -- boxes ---------------------------------------------------------------------------------------------

    def _paint_box(self, index: int, box: Box) -> None:
        begin, end = self._depth_of(index)
        middle = self._to_screen((begin + end) / 2, self._layout.centre[index])
        width, height = self._sizes[index]
        left, top = middle[0] - width / 2, middle[1] - height / 2
        spare = (height - sum(map(_row_height, (row.lines for row in box.rows)))) / len(box.rows)
        for row in box.rows:
            tall = _row_height(row.lines) + spare
            outline: Callable[..., list[Point]] = _octagon if box.is_blob else _rectangle
            self._scene.fills.append((outline(left, top, width, tall), row.colour))
            baseline = top + spare / 2 + _PADDING / 2 + FONT_SIZE - 1
            for number, line in enumerate(row.lines):
                y = baseline + number * LINE_HEIGHT
                self._scene.texts.append(Text(middle[0], y, line, FONT_SIZE, bold=number == 0))
            top += tall

    def _to_screen(self, depth: float, breadth: float) -> Point:
        """Pixels, from the left and the top."""
        top = _MARGIN + 1.5 * LINE_HEIGHT
        if self._sideways:
            return (self._total - depth if self._backwards else depth), breadth + top
        first = 1.5 * LINE_HEIGHT
        return breadth + _MARGIN, (self._total + first - depth if self._backwards else depth)


def _straight(here: Point, there: Point) -> list[Point]:
    """A straight piece as a Bézier curve."""
    return [here, there, there]


def _row_height(lines: Sequence[str]) -> float:
    return len(lines) * LINE_HEIGHT + _PADDING


def _text_size(box: Box) -> Point:
    widths = [text_width(line, bold=n == 0) for row in box.rows for n, line in enumerate(row.lines)]
    sides = 3 * _PADDING if box.is_blob else 2 * _PADDING
    return max(widths) + sides, sum(_row_height(row.lines) for row in box.rows)


def _rectangle(x: float, y: float, width: float, height: float) -> list[Point]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _octagon(x: float, y: float, width: float, height: float) -> list[Point]:
    cut = min(_PADDING, height / 3)
    right, bottom = x + width, y + height
    return [
        (x + cut, y), (right - cut, y), (right, y + cut), (right, bottom - cut),
        (right - cut, bottom), (x + cut, bottom), (x, bottom - cut), (x, y + cut),
    ]  # fmt: skip
