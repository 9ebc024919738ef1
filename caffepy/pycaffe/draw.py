"""Drawings of nets by Graphviz, without pydot (pycaffe's `draw.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from caffepy.export import drawing
from caffepy.export.drawing import (
    BLOB_COLOUR,
    COLOURS,
    DOT_FORMATS,
    LAYER_COLOUR,
    LEARNING,
    NEURON_COLOUR,
    colour,
    render_net,
)
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import LayerParameter, NetParameter

LAYER_STYLE_DEFAULT = {"shape": "record", "fillcolor": LAYER_COLOUR, "style": "filled"}
NEURON_LAYER_STYLE = {"shape": "record", "fillcolor": NEURON_COLOUR, "style": "filled"}
BLOB_STYLE = {"shape": "octagon", "fillcolor": BLOB_COLOUR, "style": "filled"}


def get_pooling_types_dict() -> dict[int, str]:
    """Return the names of pooling methods by enum value."""
    return {number: name for name, number in caffe_pb2.PoolingParameter.PoolMethod.items()}


def get_edge_label(layer: LayerParameter) -> str:
    """Return the label of the edges from a layer to its tops: batch size, number of outputs, or nothing."""
    if layer.type == "Data":
        return f"Batch {layer.data_param.batch_size}"
    if layer.type in ("Convolution", "Deconvolution"):
        return str(layer.convolution_param.num_output)
    return str(layer.inner_product_param.num_output) if layer.type == "InnerProduct" else '""'


def get_layer_lr_mult(layer: LayerParameter) -> tuple[float, float]:
    """Return the lr_mult of weights and biases; the default is 1.

    Raises:
        ValueError: the layer is not a Convolution, Deconvolution or InnerProduct, or has more than two multipliers.
    """
    if layer.type not in LEARNING:
        raise ValueError(f"{layer.type} layers do not have a learning rate multiplier")
    if len(layer.param) > 2:
        raise ValueError(f"Could not parse the learning rate multiplier: layer '{layer.name}' has more than two")
    weights, biases = [*(param.lr_mult for param in layer.param), 1.0, 1.0][:2]
    return weights, biases


def get_layer_label(layer: LayerParameter, rankdir: str, display_lrm: bool = False) -> str:
    """Return a layer's quoted label: name, type, window and, with `display_lrm`, learning rate multipliers.

    The separator is a space in vertical graphs and a literal backslash-n in horizontal graphs.
    """
    kind = layer.type
    if kind == "Pooling":
        kind = f"{kind} {get_pooling_types_dict()[layer.pooling_param.pool]}"
    lines = [layer.name, f"({kind})", *_window(layer)]
    if display_lrm and layer.type in LEARNING and any(multipliers := get_layer_lr_mult(layer)):
        lines.append(f"lr mult: {multipliers[0]:.1f}, {multipliers[1]:.1f}")
    return '"' + (" " if rankdir in ("TB", "BT") else r"\n").join(lines) + '"'


def _window(layer: LayerParameter) -> Iterator[str]:
    if layer.type == "Pooling":
        pooling = layer.pooling_param
        sizes = (pooling.kernel_size, pooling.stride, pooling.pad)
    elif layer.type in ("Convolution", "Deconvolution"):
        param = layer.convolution_param
        sizes = ([*param.kernel_size, 1][0], [*param.stride, 1][0], [*param.pad, 0][0])
    else:
        return
    for name, size in zip(("kernel size", "stride", "pad"), sizes, strict=True):
        yield f"{name}: {size}"


def choose_color_by_layertype(layertype: str) -> str:
    """Return the colour of a layer's box."""
    return COLOURS.get(layertype, LAYER_COLOUR)


class NetGraph:
    """A net's graph, with the pydot methods that scripts use.

    Args:
        caffe_net: the net.
        rankdir: LR, RL, TB or BT.
        label_edges: whether edges of the text output have labels; drawings label edges with blob names.
        phase: caffe_pb2.TRAIN or TEST, None: all layers.
        display_lrm: whether learning rate multipliers are shown.
    """

    def __init__(
        self,
        caffe_net: NetParameter,
        rankdir: str,
        label_edges: bool = True,
        phase: int | None = None,
        display_lrm: bool = False,
    ) -> None:
        self._net = caffe_net
        self._rankdir = rankdir
        self._label_edges = label_edges
        self._phase = phase
        self._display_lrm = display_lrm

    def to_string(self) -> str:
        """Return the graph in the DOT language as pycaffe does, with a node for each layer and each blob."""
        net = self._net
        layers = net.layer if self._phase is None else filter_net(net, net_state(self._phase, net.state)).layer
        nodes: dict[str, None] = {}
        edges: list[str] = []
        for layer in layers:
            self._add(layer, nodes, edges)
        lines = [f"digraph {_quoted(net.name or 'Net')} {{", f"rankdir={self._rankdir};", *nodes, *edges, "}"]
        return "\n".join(lines) + "\n"

    def _add(self, layer: LayerParameter, nodes: dict[str, None], edges: list[str]) -> None:
        label = _quoted(get_layer_label(layer, self._rankdir, self._display_lrm)[1:-1]).replace(r"\\n", r"\n")
        name = _quoted(f"{layer.name}_{layer.type}")
        nodes[f'{name} [label={label}, shape=record, fillcolor="{colour(layer)}", style=filled];'] = None
        for blob in (*layer.bottom, *layer.top):
            text = f'[label={_quoted(blob)}, shape=octagon, fillcolor="{BLOB_COLOUR}", style=filled];'
            nodes[f"{_quoted(f'{blob}_blob')} {text}"] = None
        made = get_edge_label(layer).strip('"') if self._label_edges else ""
        edges.extend(f"{_quoted(f'{blob}_blob')} -> {name};" for blob in layer.bottom)
        edges.extend(f"{name} -> {_quoted(f'{blob}_blob')} [label={_quoted(made)}];" for blob in layer.top)

    def create(self, prog: str | None = None, format: str = "png") -> bytes:
        """Return the drawing as bytes. pydot's `prog` has no effect.

        Raises:
            ConfigError: the format or rankdir is unknown, or Graphviz is not installed.
            RunError: Graphviz fails.
        """
        if format in DOT_FORMATS:
            return self.to_string().encode()
        return render_net(self._net, format, self._rankdir, self._phase, rates=self._display_lrm)

    def write(self, path: str | Path, prog: str | None = None, format: str = "raw") -> bool:
        """Write the drawing to a file; return True as pydot does."""
        Path(path).write_bytes(self.create(prog, format))
        return True


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


get_pydot_graph = NetGraph
"""Caffe's name."""


def draw_net(
    caffe_net: NetParameter, rankdir: str, ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """Return the drawing of a net as the bytes of a file.

    Args:
        caffe_net: the net.
        rankdir: LR, RL, TB or BT.
        ext: the format, one of `caffepy.export.drawing.FORMATS`.
        phase: caffe_pb2.TRAIN or TEST, None: all layers.
        display_lrm: whether learning rate multipliers are shown.

    Raises:
        ConfigError: the format or rankdir is unknown, the net is invalid, or Graphviz is not installed.
        RunError: Graphviz fails.
    """
    return render_net(caffe_net, ext, rankdir, phase, rates=display_lrm)


def draw_net_to_file(
    caffe_net: NetParameter,
    filename: str | Path,
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Draw a net to a file; its suffix selects the format. Arguments and errors as in `draw_net`."""
    drawing.draw_net(caffe_net, filename, rankdir, phase, rates=display_lrm)
