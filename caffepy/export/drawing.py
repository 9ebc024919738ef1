"""Pictures of nets: the graph of a net, written in the DOT language or rendered by Graphviz's program `dot`.

An in-place layer is a row in the box of the preceding layer, unless another layer reads the blob in between. A blob
without a producer or without a consumer is an octagon. The colours are those of Caffe's `python/caffe/draw.py`.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from google.protobuf.message import Message

from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError, ConfigError, RunError
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import LayerContext
from caffepy.layers.layer import is_user_defined
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
    if any(is_user_defined(layer.type) for layer in layers):
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
COLOURS = {"Convolution": "#FF5050", "Deconvolution": "#FF5050", "Pooling": "#FF9900", "InnerProduct": "#CC33FF"}
"""Of layers by type; others have LAYER_COLOUR."""
LEARNING = ("Convolution", "Deconvolution", "InnerProduct")
"""Types whose lr_mult a picture can show."""
LONGEST = 48
"""In characters: an ellipsis replaces the middle of a longer name or line."""


@dataclass
class _Source:
    """The producer of a blob: the index of its node, and its layer; `alone`: the blob is its only top."""

    node: int
    layer: str
    phases: frozenset[str] = frozenset()
    alone: bool = False
    was_read: bool = False


class _Picture:
    """The nodes and edges of a net in the DOT language. Nodes are numbered; names appear in escaped labels only."""

    def __init__(self, shapes: Shapes, rates: bool, all_phases: bool) -> None:
        self._shapes, self._rates, self._all_phases = shapes, rates, all_phases
        self._nodes: list[str | list[str]] = []
        """An octagon, or the rows of a box: a layer, and the in-place layers that follow it."""
        self._edges: list[str] = []
        self._sources: dict[str, list[_Source]] = {}

    def add(self, layer: caffe_pb2.LayerParameter) -> None:
        """Add a layer as a box, or as a row of the preceding box."""
        name, *rest = (escape(line) for line in (printable(layer.name), *describe(layer, self._rates)))
        text = "<BR/>".join([f"<B>{name}</B>" if name else "", *rest])
        row = f'<TR><TD BGCOLOR="{colour(layer)}">{text}</TD></TR>'
        before = self._sources.get(layer.bottom[0], []) if is_in_place(layer) else []
        if len(before) == 1 and before[0].alone and not before[0].was_read:
            rows = self._nodes[before[0].node]
            assert isinstance(rows, list)
            rows.append(row)
            return
        for bottom in layer.bottom:
            if bottom not in self._sources:
                self._sources[bottom] = [_Source(self._octagon(bottom), bottom)]
        sources = {bottom: self._sources[bottom] for bottom in layer.bottom}
        self._nodes.append([row])
        node, own = len(self._nodes) - 1, phases(layer)
        for bottom, candidates in sources.items():
            self._connect(bottom, [s for s in candidates if not own or not s.phases or own & s.phases], node)
        for top in layer.top:  # it replaces earlier producers of the name, except those of other phases
            others = self._sources.get(top, []) if self._all_phases and top not in layer.bottom else []
            source = _Source(node, layer.name, own, len(layer.top) == 1)
            self._sources[top] = [*(other for other in others if not other.was_read), source]

    def text(self, name: str, rankdir: str) -> str:
        """Return the graph, with octagons for blobs without a consumer."""
        for blob, sources in self._sources.items():
            if unread := [source for source in sources if not source.was_read]:
                self._connect(blob, unread, self._octagon(blob), labelled=False)
        lines = [
            "digraph net {",
            f"  graph [rankdir={rankdir}, label={_html(printable(name))}, labelloc=t, labeljust=l];",
            '  node [shape=plain, fontname="Helvetica", fontsize=11];',
            '  edge [fontname="Helvetica", fontsize=10, color="#606060"];',
            *(f"  n{index} [{_node(node)}];" for index, node in enumerate(self._nodes)),
            *self._edges,
            "}",
        ]
        return "\n".join(lines) + "\n"

    def _octagon(self, blob: str) -> int:
        """Add a node for a blob and return its index."""
        lines = "<BR/>".join(map(escape, (printable(blob), *self._shape(blob))))
        self._nodes.append(f'label=<{lines}>, shape=octagon, style=filled, fillcolor="{BLOB_COLOUR}"')
        return len(self._nodes) - 1

    def _connect(self, blob: str, sources: list[_Source], target: int, labelled: bool = True) -> None:
        for source in sources:
            source.was_read = True
            own = [printable(blob)] if blob != source.layer else []
            text = _html(" ".join([*own, *self._shape(blob)])) if labelled else '""'
            label = f" [label={text}]" if text != '""' else ""
            self._edges.append(f"  n{source.node} -> n{target}{label};")

    def _shape(self, blob: str) -> list[str]:
        return ["x".join(map(str, self._shapes[blob])) or "scalar"] if blob in self._shapes else []


def _node(node: str | list[str]) -> str:
    if isinstance(node, str):
        return node
    return f'label=<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="4">{"".join(node)}</TABLE>>'


def _html(text: str) -> str:
    return f"<{escape(text)}>" if text else '""'


def printable(text: str) -> str:
    """Shorten a name to one line, and escape control, format and unassigned characters."""
    shown = [c if unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in text[:1000]]
    line = "".join(shown)
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[: half - 1]}…{line[-half:]}"


def is_in_place(layer: caffe_pb2.LayerParameter) -> bool:
    """Return whether a layer's only top is its only bottom."""
    return len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]


def colour(layer: caffe_pb2.LayerParameter) -> str:
    """Return the background colour of a layer's box."""
    return NEURON_COLOUR if is_in_place(layer) else COLOURS.get(layer.type, LAYER_COLOUR)


def describe(layer: caffe_pb2.LayerParameter, rates: bool = False) -> list[str]:
    """Return the lines below a layer's name: type, phases and settings.

    Args:
        layer: the layer.
        rates: whether to add the lr_mult of a layer with weights, unless all are 0.
    """
    pools = layer.type == "Pooling"
    kind = f"Pooling {_pool.Name(layer.pooling_param.pool)}" if pools else layer.type
    named = ", ".join(sorted(phases(layer)))
    lines = [f"{kind} ({named})" if named else kind]
    lines += [", ".join(parts)] if (parts := _numbers(layer)) else []
    multipliers = [*(param.lr_mult for param in layer.param), 1.0, 1.0][:2]
    if rates and layer.type in LEARNING and any(multipliers):
        lines.append(f"lr mult: {multipliers[0]:.1f}, {multipliers[1]:.1f}")
    return [printable(line) for line in lines]


def phases(layer: caffe_pb2.LayerParameter) -> frozenset[str]:
    """Return the phases in a layer's include and exclude rules; empty: both."""
    included = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.include if rule.HasField("phase")}
    excluded = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.exclude if rule.HasField("phase")}
    return frozenset({"TRAIN", "TEST"} - excluded if excluded and not included else included)


_pool = caffe_pb2.PoolingParameter.PoolMethod


def _numbers(layer: caffe_pb2.LayerParameter) -> list[str]:
    match layer.type:
        case "Convolution" | "Deconvolution":
            param = layer.convolution_param
            group = [f"group {param.group}"] if param.group > 1 else []
            return [f"{param.num_output} outputs", *_window(param), *group]
        case "Pooling":
            return ["global"] if layer.pooling_param.global_pooling else _window(layer.pooling_param)
        case "InnerProduct":
            return [f"{layer.inner_product_param.num_output} outputs"]
        case "LRN":
            return [f"size {layer.lrn_param.local_size}"]
        case "Dropout":
            return [f"ratio {layer.dropout_param.dropout_ratio:g}"]
        case "Eltwise":
            return [caffe_pb2.EltwiseParameter.EltwiseOp.Name(layer.eltwise_param.operation)]
        case "Data" if layer.data_param.batch_size:
            return [f"batch {layer.data_param.batch_size}"]
    return []


def _window(param: caffe_pb2.ConvolutionParameter | caffe_pb2.PoolingParameter) -> list[str]:
    """Return the kernel, and stride, padding and dilation that differ from their defaults, as `stride 2x2`."""
    parts = [_pair(param, "kernel", param.kernel_size, 1)]
    for name, default in (("stride", 1), ("pad", 0), ("dilation", 1)):
        size = _pair(param, name, getattr(param, name, ()), default)
        parts += [f"{name} {size}"] if size != f"{default}x{default}" else []
    return parts


def _pair(param: Message, name: str, sizes: int | Sequence[int], default: int) -> str:
    """Return `3x3` for the sizes of a field, or for the fields of height and width if one of them is set."""
    height, width = (getattr(param, f"{name}_{side}", 0) for side in "hw")
    if height or width:
        return f"{height}x{width}"
    given = [sizes] if isinstance(sizes, int) else list(sizes) or [default]
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
    picture = _Picture(blob_shapes(upgraded, phase), rates, phase is None)
    state = None if phase is None else net_state(phase, upgraded.state, net_state(phase))
    for layer in (upgraded if state is None else filter_net(upgraded, state)).layer:
        picture.add(layer)
    text = picture.text(upgraded.name or "Net", rankdir).encode()
    return text if file_format in DOT_FORMATS else run_dot(text, file_format)


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
