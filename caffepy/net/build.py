"""Building a net's layers from its prototxt: filter, splits, wiring, set-up, which layers run backward.

The order of steps is that of `Net::Init` in Caffe's `net.cpp`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from caffepy.blob import Blob, format_shape
from caffepy.config.dialect import choose_dialect
from caffepy.config.fields import refuse_fields
from caffepy.config.filter import filter_net, is_included, net_state
from caffepy.config.load import MAX_TEXT_BYTES
from caffepy.config.paths import PathResolver
from caffepy.config.text import decode_text, layer_blocks, parse_text
from caffepy.errors import CaffepyError, DeviceError, UserError
from caffepy.files import read_regular
from caffepy.layers.core.base import LayerContext, layer_class
from caffepy.net.parameters import ParameterTable
from caffepy.net.precision import Precision, find_label_tops
from caffepy.net.splits import insert_splits
from caffepy.net.wiring import (
    GradientPlan,
    Node,
    Wiring,
    check_gradients,
    check_loss_weights,
    find_loss_readers,
    force_backward,
    insert_casts,
    overwritten_tops,
    prune_backward,
)
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)

_OF_LAYER = re.compile(r"layer '(.*?)'[ :]", re.DOTALL)
"""How messages about a layer begin."""


@dataclass(frozen=True)
class BuiltNet:
    """What `build_net` makes.

    Args:
        param: the filtered net with Split layers.
        nodes: its layers in order, with Split and Cast layers.
        blobs: its blobs by name.
        outputs: the blobs that no layer reads.
        table: its parameters.
    """

    param: caffe_pb2.NetParameter
    nodes: list[Node]
    blobs: dict[str, Blob]
    outputs: dict[str, Blob]
    table: ParameterTable


def build_net(
    param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState | None = None
) -> BuiltNet:
    """Make a net's layers and blobs and reshape every layer once; arguments and errors are those of `Net`."""
    if context.dialect is None:
        context.dialect = choose_dialect([param], lambda *line: log.log(context.log_level, *line))
    state = state or net_state(context.phase, param.state, net_state(context.phase))
    with _placed_errors(context, state):
        return _build(param, context, state)


def _build(param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState) -> BuiltNet:
    filtered = filter_net(param, state)
    check_loss_weights(filtered)
    param = insert_splits(filtered)
    wiring, table = Wiring(context.backend), ParameterTable()
    nodes: list[Node] = []
    plan = GradientPlan()
    for node in _connect_layers(param, context, wiring):
        _setup(node)
        table.add(node.layer)
        plan.add(node)
        _log_layer(context.log_level, node)
        nodes.append(node)
    _plan_backward(nodes, context, param.force_backward)
    built = BuiltNet(param, nodes, wiring.blobs, wiring.outputs(), table)
    _log_outputs(context.log_level, built)
    return built


@contextmanager
def _placed_errors(context: LayerContext, state: caffe_pb2.NetState) -> Iterator[None]:
    """Begin a user's error about a layer with file and line of the layer, where the net is of a prototxt."""
    try:
        yield
    except UserError as error:
        found, resolve = _OF_LAYER.match(str(error)), context.resolve
        if found and not isinstance(error, DeviceError) and isinstance(resolve, PathResolver) and resolve.prototxt:
            lines = _lines_of_layer(resolve.prototxt, found[1], state)
            if lines:
                error.args = (f"{resolve.prototxt}:{' or '.join(map(str, lines))}: {error}",)
        raise


def _lines_of_layer(prototxt: Path, name: str, state: caffe_pb2.NetState) -> list[int]:
    """The lines of the layers in a prototxt that have a name and are in the net; none where it cannot be told.

    protobuf's reader keeps no lines, so that the text is looked at once more, in this case alone.
    """
    lines = []
    with suppress(CaffepyError, OSError, RecursionError):
        for line, block in layer_blocks(decode_text(read_regular(prototxt, MAX_TEXT_BYTES), str(prototxt))):
            net = parse_text(block, caffe_pb2.NetParameter(), str(prototxt))
            layer = net.layer[0] if net.layer else net.layers[0]
            own = layer.layer if isinstance(layer, caffe_pb2.V1LayerParameter) and layer.HasField("layer") else layer
            if own.name == name and ((layer.include and layer.exclude) or is_included(layer, state)):
                lines.append(line)
    return lines


def _connect_layers(param: caffe_pb2.NetParameter, context: LayerContext, wiring: Wiring) -> Iterator[Node]:
    """The nodes in order, Cast layers before those that need them.

    A generator, because a layer is connected to blobs that the layers before it have already given their shapes.
    """
    precision, earlier = Precision(param, context.backend), Counter[str]()
    for layer_param, overwritten, labels in zip(
        param.layer, overwritten_tops(param.layer), find_label_tops(param), strict=True
    ):
        cls = layer_class(layer_param.type, f"layer '{layer_param.name}'")
        refuse_fields(layer_param, f"layer '{layer_param.name}' ({layer_param.type})")
        layer = cls(layer_param, context)
        layer.tops_overwritten, layer.label_tops = overwritten, labels
        if count := earlier[layer.name]:
            layer.random_name = f"{layer.name}, after {count} of the same name"
        earlier[layer.name] += 1
        node = wiring.connect(layer, precision)
        yield from insert_casts(node, context)
        yield node


def _setup(node: Node) -> None:
    with node.named_errors():
        node.layer.setup(node.bottoms, node.tops)
    node.reshape()


def _plan_backward(nodes: list[Node], context: LayerContext, forced: bool) -> None:
    prune_backward(nodes)
    find_loss_readers(nodes)
    for node in nodes:
        if node.layer.tops_overwritten and any(node.layer.loss_weights):
            node.layer.saved_loss = context.backend.zeros(())
    if forced:
        force_backward(nodes)
    if context.phase == caffe_pb2.TRAIN:
        check_gradients(nodes)


def _log_layer(level: int, node: Node) -> None:
    layer = node.layer
    log.log(level, "Creating Layer %s (%s)", layer.name, layer.type)
    for bottom in node.bottoms:
        log.log(level, "%s <- %s", layer.name, bottom.name)
    for top, weight in zip(node.tops, layer.loss_weights, strict=True):
        in_place = " (in-place)" if top in node.bottoms else ""
        log.log(level, "%s -> %s%s", layer.name, top.name, in_place)
        log.log(level, "Top shape: %s", format_shape(top.shape))
        if weight:
            log.log(level, "    with loss weight %g", weight)


def _log_outputs(level: int, built: BuiltNet) -> None:
    for node in built.nodes:
        need = "needs" if node.need_backward else "does not need"
        log.log(level, "%s %s backward computation.", node.layer.name, need)
    for name in built.outputs:
        log.log(level, "This network produces output %s", name)
    log.log(level, "Network initialization done.")
