"""Text and HTML summaries of a net, for `repr` and notebooks.

HTML output escapes all text, because names come from files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from caffepy.blob import Blob
from caffepy.errors import printable
from caffepy.net.wiring import Node
from caffepy.proto import caffe_pb2

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
