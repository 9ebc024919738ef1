"""Texts about a net: summaries for `repr` and notebooks, and the log lines of `debug_info: true`.

HTML output escapes all text, because names come from files. The lines are worded as in Caffe's `net.cpp`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from caffepy.errors import printable
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer
from caffepy.net.graph import Node

if TYPE_CHECKING:
    from caffepy.net.parameters import ParameterBuffer

log = logging.getLogger(__name__)


_STYLE = "text-align: left; padding: 1px 8px;"
_HEADER = ("layer", "type", "bottoms", "tops", "parameters", "dtype")


def describe_net(name: str, phase: int, nodes: Sequence[Node], where: str) -> str:
    """``<caffepy net 'lenet' (TRAIN): 9 layers, 431,080 parameters, on CPU, 2 threads>``."""
    count = sum(blob.count for blob in _own_parameters(nodes))
    layers = len(_shown(nodes))
    title = f"{printable(name)}' ({caffe_pb2.Phase.Name(phase)})"
    return f"<caffepy net '{title}: {layers} layers, {count:,} parameters, on {where}>"


def net_table(title: str, nodes: Sequence[Node]) -> str:
    """Return an HTML table: a row for each layer with blob shapes, parameter shapes and the dtype of its tops."""
    return heading(title.strip("<>")) + table(_HEADER, _rows(_shown(nodes)))


def _shown(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes without the automatic Split layers."""
    return [node for node in nodes if node.layer.type != "Split"]


def _own_parameters(nodes: Sequence[Node]) -> list[Blob]:
    """Return each parameter once, also where layers share it."""
    blobs = (blob.gradient_owner for node in nodes for blob in node.layer.blobs)
    return list({id(blob): blob for blob in blobs}.values())


def _rows(nodes: Sequence[Node]) -> Iterator[tuple[str, ...]]:
    for node in nodes:
        layer = node.layer
        dtypes = list(dict.fromkeys(top.dtype for top in node.tops))
        yield (
            layer.name,
            layer.type,
            _blobs(node.bottoms),
            _blobs(node.tops),
            ", ".join(_shape(blob) for blob in layer.blobs),
            ", ".join(dtypes),
        )


def _blobs(blobs: Sequence[Blob]) -> str:
    return ", ".join(f"{blob.name} {_shape(blob)}" for blob in blobs)


def _shape(blob: Blob) -> str:
    return " × ".join(map(str, blob.shape)) or "1 number"


def heading(text: str) -> str:
    """Return a line in bold."""
    return f"<p><b>{escape(text)}</b></p>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a row of titles."""
    lines = [_row("th", header), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    written = (f"<{tag} style='{_STYLE}'>{escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{''.join(written)}</tr>"


def mean_magnitude(values: np.ndarray) -> float:
    """Return the mean of the absolute values, as Caffe prints it."""
    return float(np.abs(values).sum(dtype=np.float64) / max(values.size, 1))


def log_forward(node: Node) -> None:
    """Log the tops and parameters of a layer after its forward pass."""
    prefix = f"    [Forward] Layer {node.layer.name}"
    for top in node.tops:
        log.info("%s, top blob %s data: %.6g", prefix, top.name, mean_magnitude(top.host_data()))
    for index, blob in enumerate(node.layer.blobs):
        name = display_name(node.layer, index)
        log.info("%s, param blob %s data: %.6g", prefix, name, mean_magnitude(blob.host_data()))


def log_backward(node: Node) -> None:
    """Log the gradients of a layer's bottoms and parameters after its backward pass."""
    prefix = f"    [Backward] Layer {node.layer.name}"
    for bottom, down in zip(node.bottoms, node.propagate_down, strict=True):
        if down:
            log.info("%s, bottom blob %s diff: %.6g", prefix, bottom.name, mean_magnitude(bottom.host_diff()))
    for index, blob in enumerate(node.layer.blobs):
        if node.layer.propagate_to_params[index]:
            log.info("%s, param blob %d diff: %.6g", prefix, index, mean_magnitude(blob.host_diff()))


def log_norms(parameters: ParameterBuffer) -> None:
    """Log the L1 and L2 norms of all parameters and of all gradients."""
    values = [parameter.blob.host_data().ravel() for parameter in parameters.parameters]
    norms = [_norms(np.concatenate([np.empty(0), *values])), _norms(parameters.backend.to_host(parameters.gradients))]
    log.info(
        "    [Backward] All net params (data, diff): L1 norm = (%.6g, %.6g); L2 norm = (%.6g, %.6g)",
        norms[0][0],
        norms[1][0],
        norms[0][1],
        norms[1][1],
    )


def log_update(parameters: ParameterBuffer, before: np.ndarray) -> None:
    """Log each parameter's magnitude and the magnitude of its update; `before` holds the flat values before it."""
    after = parameters.backend.to_host(parameters.data)
    for parameter in parameters.parameters:
        elements = slice(parameter.start, parameter.stop)
        log.info(
            "    [Update] Layer %s, param %s data: %.6g; diff: %.6g",
            parameter.layer.name,
            display_name(parameter.layer, parameter.index),
            mean_magnitude(before[elements]),
            mean_magnitude(before[elements] - after[elements]),
        )


def display_name(layer: Layer, index: int) -> str:
    """Return a parameter's name in Caffe's log: the name in its ParamSpec, else its index."""
    specs = layer.param.param
    return (specs[index].name if index < len(specs) else "") or str(index)


def _norms(values: np.ndarray) -> tuple[float, float]:
    wide = values.astype(np.float64)
    return float(np.abs(wide).sum()), math.sqrt(float(wide @ wide))
