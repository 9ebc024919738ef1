"""The dtype of each layer's blobs: NVIDIA Caffe's type fields, and which blobs are labels.

Fields: `default_forward_type`, `forward_type` and their backward counterparts. Sums are float32 regardless of the
`*_math` fields, at no cost on current hardware. Labels are float32 from their source on: float16 has only even integers
above 2,048.
"""

from __future__ import annotations

import logging

from caffepy.backend import Backend
from caffepy.errors import ConfigError
from caffepy.layers.core.base import Layer, layer_class
from caffepy.net.splits import Source, find_sources
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)

_DTYPES = {caffe_pb2.FLOAT: "float32", caffe_pb2.FLOAT16: "float16", caffe_pb2.BFLOAT16: "bfloat16"}


def dtype_name(kind: caffe_pb2.Type, where: str) -> str:
    """Return the dtype of a value of the schema's Type.

    Raises:
        ConfigError: blobs do not support the type.
    """
    if kind not in _DTYPES:
        raise ConfigError(f"{where}: type {caffe_pb2.Type.Name(kind)} is not supported; use FLOAT, FLOAT16 or BFLOAT16")
    return _DTYPES[kind]


def find_label_tops(net: caffe_pb2.NetParameter) -> list[frozenset[int]]:
    """Return for each layer of a net (with Split layers) the tops that must be float32 because they carry labels.

    A top carries labels if two conditions hold. It reaches a label bottom through layers that move elements or map each
    one separately. It comes from data, from a layer that supports only float32, or from another such top.
    """
    classes = [layer_class(layer.type, f"layer '{layer.name}'") for layer in net.layer]
    sources = find_sources(net)
    wanted = _read_as_labels(net, classes, sources)
    exact: set[Source] = set()
    for i, (layer, kind) in enumerate(zip(net.layer, classes, strict=True)):
        handed_on = kind.keeps_labels and any(sources[i, j] in exact for j in range(len(layer.bottom)))
        if not layer.bottom or not kind.supports_half or handed_on:
            exact.update((i, j) for j in range(len(layer.top)) if (i, j) in wanted)
    return [frozenset(j for j in range(len(layer.top)) if (i, j) in exact) for i, layer in enumerate(net.layer)]


def _read_as_labels(
    net: caffe_pb2.NetParameter, classes: list[type[Layer]], sources: dict[tuple[int, int], Source]
) -> set[Source]:
    """Return the tops that reach a label bottom through layers that keep labels."""
    labels: set[Source] = set()
    for i in reversed(range(len(net.layer))):
        layer, kind = net.layer[i], classes[i]
        bottoms = range(len(layer.bottom))
        labels.update(sources[i, j] for j in bottoms if j in kind.no_gradient_bottoms | kind.exact_bottoms)
        if kind.keeps_labels and any((i, j) in labels for j in range(len(layer.top))):
            labels.update(sources[i, j] for j in bottoms)
    return labels


class Precision:
    """The dtypes of one net's layers.

    A layer has one dtype for values and gradients. It is float32 if forward and backward types differ or the device
        does not support the requested dtype.

    Args:
        net: gives the default types.
        backend: the device.
    """

    def __init__(self, net: caffe_pb2.NetParameter, backend: Backend) -> None:
        self._net = net
        self._backend = backend
        self._told: set[str] = set()

    def dtype(self, layer: Layer, bottoms: list[str], in_place: str | None) -> str:
        """Return the dtype of a layer's bottoms and tops.

        Args:
            layer: the layer.
            bottoms: its bottoms' dtypes.
            in_place: the dtype of a bottom that is also a top.
        """
        if not layer.supports_half:
            return "float32"
        if in_place is not None:
            return in_place
        if layer.keeps_labels and layer.label_tops:
            return "float32"
        if layer.inherits_dtype and bottoms and not layer.param.HasField("forward_type"):
            return bottoms[0]
        return self._asked(layer)

    def _asked(self, layer: Layer) -> str:
        where = f"layer '{layer.name}' ({layer.type})"
        param, net = layer.param, self._net
        kinds = [
            getattr(param, f"{way}_type") if param.HasField(f"{way}_type") else getattr(net, f"default_{way}_type")
            for way in ("forward", "backward")
        ]
        forward, backward = (dtype_name(kind, where) for kind in kinds)
        if forward != backward and "float32" in (forward, backward):
            # The opposite combination saves little memory traffic and would double the number of kernels.
            self._tell(f"{where}: forward_type and backward_type differ; its blobs are kept in float32")
            return "float32"
        if forward != backward:
            raise ConfigError(f"{where}: forward_type is {forward} and backward_type {backward}; make them the same")
        if forward not in self._backend.dtypes:
            self._tell(f"{self._backend.name} keeps all blobs in float32, although the net asks for {forward}")
            return "float32"
        return forward

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.info("%s", message)
