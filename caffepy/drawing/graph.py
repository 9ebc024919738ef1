"""A net as boxes and edges.

A layer that works in place is a row in the box of the layer before it, as long as nobody else has read the blob by
then; so a picture has no loops and half the boxes. A blob that no layer makes, or none reads, is an octagon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from caffepy.config.filter import filter_net, net_state
from caffepy.drawing.labels import BLOB_COLOUR, NEURON_COLOUR, colour, describe, dimensions, phases, printable
from caffepy.proto import caffe_pb2

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Row:
    """One layer, or blob, in a box.

    Args:
        lines: its name and what it is.
        colour: the fill, as #RRGGBB.
    """

    lines: tuple[str, ...]
    colour: str


@dataclass
class Box:
    """A node: a layer with the in-place layers that follow it, or a blob.

    Args:
        rows: from first to last.
        is_blob: drawn as an octagon.
    """

    rows: list[Row]
    is_blob: bool = False


@dataclass(frozen=True)
class Edge:
    """A blob on its way from the box at index `source` to the one at `target`, which is always later.

    Args:
        source: index of the box that makes it.
        target: index of the box that reads it.
        blob: number of the blob among those that `source` makes.
        label: its name, where that is not the layer's, and its shape, where known.
    """

    source: int
    target: int
    blob: int
    label: str


@dataclass
class Graph:
    """What is drawn.

    Args:
        name: the net's.
        boxes: in the order of the layers.
        edges: between them.
    """

    name: str
    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


@dataclass
class _Source:
    """Who makes a blob: a box, and the number of the blob among its own."""

    box: int
    blob: int
    layer: str
    phases: frozenset[str] = frozenset()
    was_read: bool = False


class _Builder:
    """Makes the graph, layer by layer."""

    def __init__(self, name: str, shapes: Shapes, rates: bool, all_phases: bool) -> None:
        self.graph = Graph(printable(name))
        self._shapes = shapes
        self._rates = rates
        self._all_phases = all_phases
        self._sources: dict[str, list[_Source]] = {}
        self._blobs: defaultdict[int, int] = defaultdict(int)

    def add(self, layer: caffe_pb2.LayerParameter) -> None:
        """A layer as a box, or as a row of the box before it."""
        lines = (printable(layer.name), *describe(layer, self._rates))
        in_place = len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]
        before = self._sources.get(layer.bottom[0], []) if in_place else []
        if len(before) == 1 and self._can_follow(before[0]):
            self.graph.boxes[before[0].box].rows.append(Row(lines, NEURON_COLOUR))
            return
        sources = {bottom: self._sources_of(bottom) for bottom in layer.bottom}
        index = self._new_box(Box([Row(lines, colour(layer))]))
        own = phases(layer)
        for bottom, makers in sources.items():
            meeting = [maker for maker in makers if not own or not maker.phases or own & maker.phases]
            self._connect(bottom, meeting, index)
        for top in layer.top:
            self._make(top, index, layer)

    def finish(self) -> Graph:
        """Octagons for the blobs that nobody reads, and the graph."""
        for name, sources in self._sources.items():
            unread = [source for source in sources if not source.was_read]
            if unread:
                self._connect(name, unread, self._new_box(self._octagon(name)), labelled=False)
        return self.graph

    def _sources_of(self, name: str) -> list[_Source]:
        """Who makes a blob; an octagon if nobody does."""
        if name not in self._sources:
            box = self._new_box(self._octagon(name))
            self._blobs[box] = 1
            self._sources[name] = [_Source(box, 0, name)]
        return self._sources[name]

    def _octagon(self, name: str) -> Box:
        return Box([Row((printable(name), *self._shape(name)), BLOB_COLOUR)], is_blob=True)

    def _can_follow(self, source: _Source) -> bool:
        """Whether an in-place layer can be a row: nobody has read its blob, the only one that the box makes."""
        is_layer = not self.graph.boxes[source.box].is_blob
        return is_layer and not source.was_read and self._blobs[source.box] == 1

    def _new_box(self, box: Box) -> int:
        self.graph.boxes.append(box)
        return len(self.graph.boxes) - 1

    def _make(self, name: str, box: int, layer: caffe_pb2.LayerParameter) -> None:
        """A top: it takes the name over, unless layers of other phases make the same blob."""
        source = _Source(box, self._blobs[box], layer.name, phases(layer))
        self._blobs[box] += 1
        others = self._sources.get(name, []) if self._all_phases and name not in layer.bottom else []
        self._sources[name] = [*(other for other in others if not other.was_read), source]

    def _connect(self, name: str, sources: list[_Source], target: int, labelled: bool = True) -> None:
        for source in sources:
            source.was_read = True
            label = self._label(name, source) if labelled else ""
            self.graph.edges.append(Edge(source.box, target, source.blob, label))

    def _label(self, name: str, source: _Source) -> str:
        own = [printable(name)] if name != source.layer else []
        return " ".join([*own, *self._shape(name)])

    def _shape(self, name: str) -> list[str]:
        return [dimensions(self._shapes[name])] if name in self._shapes else []


def make_graph(net: caffe_pb2.NetParameter, phase: int | None, shapes: Shapes, rates: bool = False) -> Graph:
    """The boxes and edges of a net.

    Args:
        net: the net, of the current format.
        phase: draw the layers of this phase; None: all layers, those of one phase with its name.
        shapes: of blobs, by name, where known.
        rates: say the lr_mult of layers that learn.
    """
    layers = net.layer if phase is None else filter_net(net, net_state(phase, net.state, net_state(phase))).layer
    builder = _Builder(net.name or "Net", shapes, rates, phase is None)
    for layer in layers:
        builder.add(layer)
    return builder.finish()
