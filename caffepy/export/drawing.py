"""Pictures of nets: the graph of a net, written in the DOT language or rendered by Graphviz's program `dot`.

An in-place layer is a row in the box of the preceding layer, unless another layer reads the blob in between. A blob
without a producer or without a consumer is an octagon. The colours are those of Caffe's `python/caffe/draw.py`.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError, ConfigError, RunError
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import LayerContext, is_registered
from caffepy.net import Net
from caffepy.net.record_shape import told_shape
from caffepy.utils.files import atomic_write

log = logging.getLogger(__name__)


def blob_shapes(net: caffe_pb2.NetParameter, phase: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a net's blobs by name, as far as they follow from the prototxt (Input layers, crop sizes).

    No data source is opened. A net with Python layers is not built, because that would run their code.
    """
    phases = (caffe_pb2.TEST, caffe_pb2.TRAIN) if phase is None else (phase,)
    shapes: dict[str, tuple[int, ...]] = {}
    for number in phases:
        try:
            shapes |= _shapes_in(net, number)
        except CaffepyError as error:
            log.debug("no shapes of blobs in phase %s: %s", caffe_pb2.Phase.Name(number), error)
    return shapes


def _shapes_in(param: caffe_pb2.NetParameter, phase: int) -> dict[str, tuple[int, ...]]:
    state = net_state(phase, param.state, net_state(phase))
    layers = filter_net(param, state).layer
    if any(layer.type == "Python" or is_registered(layer.type) for layer in layers):
        return {}
    nvidia = choose_dialect([param], lambda *line: None) is Dialect.NVIDIA
    samples = {
        top: told[0] if index == 0 else ()
        for layer in layers
        if not layer.bottom and (told := told_shape(layer, nvidia)) is not None
        for index, top in enumerate(layer.top)
    }
    net = Net(param, LayerContext(MetaBackend(), phase=phase, sample_shapes=samples), state)
    try:
        return {name: tuple(blob.shape) for name, blob in net.blobs.items()}
    finally:
        net.close()


Shapes = Mapping[str, Sequence[int]]

LAYER_COLOUR = "#6495ED"
NEURON_COLOUR = "#90EE90"
"""Of an in-place layer."""
BLOB_COLOUR = "#E0E0E0"
_COLOURS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
LONGEST = 48
"""In characters: an ellipsis replaces the middle of a longer name or line."""


@dataclass(frozen=True)
class BoxRow:
    """One layer, or blob, in a box.

    Args:
        lines: of text: name, type, settings.
        colour: of the background, as #RRGGBB.
    """

    lines: tuple[str, ...]
    colour: str


@dataclass
class Box:
    """A node: a layer with the in-place layers that follow it, or a blob.

    Args:
        rows: from top to bottom.
        is_blob: whether it is a blob, drawn as an octagon.
    """

    rows: list[BoxRow]
    is_blob: bool = False


@dataclass(frozen=True)
class Edge:
    """A blob as an edge from the box at index `source` to the box at index `target`.

    Args:
        source: index of the box that makes it.
        target: index of the box that reads it.
        label: the blob's name, unless it is the layer's, and its shape, if known.
    """

    source: int
    target: int
    label: str


@dataclass
class NetGraph:
    """Boxes and edges of a net.

    Args:
        name: of the net.
        boxes: in the order of the layers.
        edges: between them.
    """

    name: str
    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


@dataclass
class _Source:
    """The producer of a blob: the index of its box, and its layer."""

    box: int
    layer: str
    phases: frozenset[str] = frozenset()
    was_read: bool = False


class _Builder:
    """Builds the graph, layer by layer."""

    def __init__(self, name: str, shapes: Shapes, rates: bool, all_phases: bool) -> None:
        self.graph = NetGraph(printable(name))
        self._shapes = shapes
        self._rates = rates
        self._all_phases = all_phases
        self._sources: dict[str, list[_Source]] = {}
        self._top_counts: defaultdict[int, int] = defaultdict(int)
        """Number of tops of each box."""

    def add(self, layer: caffe_pb2.LayerParameter) -> None:
        """Add a layer as a box, or as a row of the preceding box."""
        lines = (printable(layer.name), *describe(layer, self._rates))
        in_place = len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]
        before = self._sources.get(layer.bottom[0], []) if in_place else []
        if len(before) == 1 and self._can_follow(before[0]):
            self.graph.boxes[before[0].box].rows.append(BoxRow(lines, NEURON_COLOUR))
            return
        sources = {bottom: self._sources_of(bottom) for bottom in layer.bottom}
        index = self._new_box(Box([BoxRow(lines, colour(layer))]))
        own = phases(layer)
        for bottom, candidates in sources.items():
            same_phase = [source for source in candidates if not own or not source.phases or own & source.phases]
            self._connect(bottom, same_phase, index)
        for top in layer.top:
            self._add_top(top, index, layer)

    def finish(self) -> NetGraph:
        """Add octagons for blobs without a consumer, and return the graph."""
        for name, sources in self._sources.items():
            unread = [source for source in sources if not source.was_read]
            if unread:
                self._connect(name, unread, self._new_box(self._octagon(name)), labelled=False)
        return self.graph

    def _sources_of(self, name: str) -> list[_Source]:
        """Return the producers of a blob; a new octagon if there is none."""
        if name not in self._sources:
            box = self._new_box(self._octagon(name))
            self._top_counts[box] = 1
            self._sources[name] = [_Source(box, name)]
        return self._sources[name]

    def _octagon(self, name: str) -> Box:
        return Box([BoxRow((printable(name), *self._shape(name)), BLOB_COLOUR)], is_blob=True)

    def _can_follow(self, source: _Source) -> bool:
        """Whether an in-place layer can be a row: its blob is the only top of the box and has no consumer so far."""
        is_layer = not self.graph.boxes[source.box].is_blob
        return is_layer and not source.was_read and self._top_counts[source.box] == 1

    def _new_box(self, box: Box) -> int:
        self.graph.boxes.append(box)
        return len(self.graph.boxes) - 1

    def _add_top(self, name: str, box: int, layer: caffe_pb2.LayerParameter) -> None:
        """Add a top. It replaces earlier producers of the name, except those of other phases."""
        source = _Source(box, layer.name, phases(layer))
        self._top_counts[box] += 1
        others = self._sources.get(name, []) if self._all_phases and name not in layer.bottom else []
        self._sources[name] = [*(other for other in others if not other.was_read), source]

    def _connect(self, name: str, sources: list[_Source], target: int, labelled: bool = True) -> None:
        for source in sources:
            source.was_read = True
            label = self._label(name, source) if labelled else ""
            self.graph.edges.append(Edge(source.box, target, label))

    def _label(self, name: str, source: _Source) -> str:
        own = [printable(name)] if name != source.layer else []
        return " ".join([*own, *self._shape(name)])

    def _shape(self, name: str) -> list[str]:
        return [dimensions(self._shapes[name])] if name in self._shapes else []


def make_graph(net: caffe_pb2.NetParameter, phase: int | None, shapes: Shapes, rates: bool = False) -> NetGraph:
    """Return the boxes and edges of a net.

    Args:
        net: in the current format.
        phase: of the layers to draw; None: all layers, with the phase in the text of a layer of one phase.
        shapes: of the blobs, by name, as far as known.
        rates: whether to show the lr_mult of layers with weights.
    """
    layers = net.layer if phase is None else filter_net(net, net_state(phase, net.state, net_state(phase))).layer
    builder = _Builder(net.name or "Net", shapes, rates, phase is None)
    for layer in layers:
        builder.add(layer)
    return builder.finish()


def printable(text: str) -> str:
    """Shorten a name to one line, and escape control, format and unassigned characters."""
    shown = [c if unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in text[:1000]]
    line = "".join(shown)
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[: half - 1]}…{line[-half:]}"


def colour(layer: caffe_pb2.LayerParameter) -> str:
    """Return the background colour of a layer's box."""
    if len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]:
        return NEURON_COLOUR
    return _COLOURS.get(layer.type, LAYER_COLOUR)


def describe(layer: caffe_pb2.LayerParameter, rates: bool = False) -> list[str]:
    """Return the lines below a layer's name: type, phases and settings.

    Args:
        layer: the layer.
        rates: whether to add the lr_mult of a layer with weights, unless all are 0.
    """
    kind = f"{layer.type} {_pool_method(layer)}".rstrip()
    named = ", ".join(sorted(phases(layer)))
    lines = [f"{kind} ({named})" if named else kind]
    lines += [", ".join(parts)] if (parts := _numbers(layer)) else []
    if rates and layer.type in ("Convolution", "Deconvolution", "InnerProduct"):
        multipliers = [param.lr_mult for param in layer.param[:2]]
        multipliers += [1.0] * (2 - len(multipliers))
        lines += [f"lr mult: {multipliers[0]:.1f}, {multipliers[1]:.1f}"] if any(multipliers) else []
    return [printable(line) for line in lines]


def dimensions(shape: Sequence[int]) -> str:
    """Return a blob's shape as text: `1x3x224x224`."""
    return "x".join(map(str, shape)) or "scalar"


def phases(layer: caffe_pb2.LayerParameter) -> frozenset[str]:
    """Return the phases in a layer's include and exclude rules; empty: both."""
    included = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.include if rule.HasField("phase")}
    excluded = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.exclude if rule.HasField("phase")}
    return frozenset({"TRAIN", "TEST"} - excluded if excluded and not included else included)


def _pool_method(layer: caffe_pb2.LayerParameter) -> str:
    if layer.type != "Pooling":
        return ""
    return caffe_pb2.PoolingParameter.PoolMethod.Name(layer.pooling_param.pool)


def _numbers(layer: caffe_pb2.LayerParameter) -> list[str]:
    if layer.type in ("Convolution", "Deconvolution"):
        return _of_convolution(layer.convolution_param)
    if layer.type == "Pooling":
        return _of_pooling(layer.pooling_param)
    if layer.type == "InnerProduct":
        return [f"{layer.inner_product_param.num_output} outputs"]
    if layer.type == "LRN":
        return [f"size {layer.lrn_param.local_size}"]
    if layer.type == "Dropout":
        return [f"ratio {layer.dropout_param.dropout_ratio:g}"]
    if layer.type == "Eltwise":
        return [caffe_pb2.EltwiseParameter.EltwiseOp.Name(layer.eltwise_param.operation)]
    if layer.type == "Data" and layer.data_param.batch_size:
        return [f"batch {layer.data_param.batch_size}"]
    return []


def _of_convolution(param: caffe_pb2.ConvolutionParameter) -> list[str]:
    """Return outputs, kernel, stride, padding, dilation and group that differ from their defaults."""
    kernel = _pair(param.kernel_size, param.kernel_h, param.kernel_w, 1)
    parts = [f"{param.num_output} outputs", f"{kernel}"]
    stride = _pair(param.stride, param.stride_h, param.stride_w, 1)
    pad = _pair(param.pad, param.pad_h, param.pad_w, 0)
    dilation = _pair(param.dilation, 0, 0, 1)
    parts += [f"stride {stride}"] if stride != "1x1" else []
    parts += [f"pad {pad}"] if pad != "0x0" else []
    parts += [f"dilation {dilation}"] if dilation != "1x1" else []
    return [*parts, *([f"group {param.group}"] if param.group > 1 else [])]


def _of_pooling(param: caffe_pb2.PoolingParameter) -> list[str]:
    if param.global_pooling:
        return ["global"]
    stride = _pair([param.stride], param.stride_h, param.stride_w, 1)
    pad = _pair([param.pad], param.pad_h, param.pad_w, 0)
    parts = [_pair([param.kernel_size], param.kernel_h, param.kernel_w, 1)]
    parts += [f"stride {stride}"] if stride != "1x1" else []
    return parts + ([f"pad {pad}"] if pad != "0x0" else [])


def _pair(sizes: Sequence[int], height: int, width: int, otherwise: int) -> str:
    """Return `3x3` for a repeated field, or for the fields of height and width if one of them is set."""
    if height or width:
        return f"{height}x{width}"
    given = list(sizes) or [otherwise]
    return "x".join(map(str, given if len(given) > 1 else given * 2))


RANKDIRS = ("LR", "RL", "TB", "BT")
DOT_FORMATS = ("dot", "gv", "raw")
"""Endings of files in the DOT language; pydot calls the format raw."""
FORMATS = ("svg", "png", "pdf", *DOT_FORMATS)
TIMEOUT = 120
"""Limit of one run of `dot`, in seconds. (The layout of a net with thousands of layers takes minutes.)"""


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
        net: the net; a copy of it is upgraded if it has an older format.
        path: of the file; its ending is one of `FORMATS`.
        rankdir: direction of the graph: LR (left to right), RL, TB (top to bottom) or BT.
        phase: of the layers to draw, caffe_pb2.TRAIN or TEST; None: layers of all phases.
        rates: whether to show the lr_mult of layers with weights.

    Raises:
        ConfigError: the ending or rankdir is unknown, the net is invalid, or Graphviz is not installed.
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
    """Return the bytes of a picture; arguments and errors as in `draw_net`."""
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


def dot_text(graph: NetGraph, rankdir: str) -> str:
    """Return the graph in the DOT language. Nodes are numbered; names appear in escaped labels only."""
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


def _edges(graph: NetGraph) -> Iterator[str]:
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
    """Render a text in the DOT language by Graphviz's `dot`, and return the picture.

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
