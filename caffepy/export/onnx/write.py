"""A net as an ONNX model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from google.protobuf import text_format
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from caffepy.errors import ConfigError
from caffepy.export.onnx import rules
from caffepy.export.onnx.graph import COMPOSITES, DEFAULT, EXPORTERS, NEWEST, OLDEST, PARAMETER_NAMES, Graph, LayerView
from caffepy.export.onnx.prepare import as_half
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import import_families
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.version import __version__

_ = rules  # its functions register themselves

LARGEST_MODEL = 2**31 - 1
"""Bytes that protobuf can hold."""
LEAST_HALF = 16
"""Elements of a constant from which on it is stored as float16."""
COMPOSITE_KEY = "caffepy.layer."
"""Before a layer's name, a key of the model's metadata: what a layer was that became several nodes."""

Varying = Mapping[str, Sequence[bool]]


def to_model(net: Net, opset: int = DEFAULT, varying: Varying | None = None, half: bool = False) -> ModelProto:
    """A net as an ONNX model.

    Args:
        net: in phase TEST, with its weights, on a backend that holds values.
        opset: the version of the operators.
        varying: of each blob's axes whether their size follows the batch; None: the batch is the net's.
        half: store parameters that float16 holds exactly as float16, each with a Cast to float32.

    Raises:
        ConfigError: layers have no ONNX form, all of which are named, the net has no output, or `opset` is unknown.
    """
    if not OLDEST <= opset <= NEWEST:
        raise ConfigError(f"opset is {opset}; {OLDEST} to {NEWEST} can be written")
    import_families(layer.type for layer in net.layers)
    _refuse_missing(net)
    writer = _Writer(net, Graph(opset), varying or {})
    for node in net.nodes:
        writer.add(node)
    if half:
        _store_as_half(writer.graph)
    return writer.model()


def _store_as_half(graph: Graph) -> None:
    casts = []
    for name, constant in list(graph.constants.items()):
        values = numpy_helper.to_array(constant)
        stored = as_half(values) if values.dtype == np.float32 and values.size >= LEAST_HALF else values
        if stored.dtype == np.float16:
            del graph.constants[name]
            half = graph.constant(stored, f"{name}/half")
            casts.append(helper.make_node("Cast", [half], [name], name=f"{name}/Cast", to=TensorProto.FLOAT))
    graph.nodes[:0] = casts


def serialised(model: ModelProto) -> bytes:
    """The bytes of a checked model.

    Raises:
        ConfigError: it is larger than protobuf can hold.
    """
    if model.ByteSize() > LARGEST_MODEL:
        raise ConfigError(f"the model has {model.ByteSize()} bytes, more than the {LARGEST_MODEL} of an ONNX file")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _refuse_missing(net: Net) -> None:
    missing = [layer for layer in net.layers if layer.type not in EXPORTERS and layer.type != "Input"]
    if missing:
        named = ", ".join(f"'{layer.name}' ({layer.type})" for layer in missing)
        raise ConfigError(
            f"{len(missing)} of the net's layers have no ONNX form: {named}; docs/how-to/onnx.md lists the types that "
            "have one"
        )


class _Writer:
    """A graph while it grows, layer by layer.

    Args:
        net: the net.
        graph: its nodes.
        varying: see `to_model`.
    """

    def __init__(self, net: Net, graph: Graph, varying: Varying) -> None:
        self.net, self.graph, self.varying = net, graph, varying
        self.values: dict[Blob, str] = {}
        """The value that each blob has by now."""
        self.last = {top: node for node in net.nodes for top in node.tops}
        """Which layer writes each blob last."""
        self.inputs: list[ValueInfoProto] = []
        self.metadata: dict[str, str] = {}
        self.resized: set[Blob] = set()
        """Blobs whose shape depends on numbers."""
        self.graph.names |= set(net.blobs)
        inputs = [top for node in net.nodes if node.layer.type == "Input" for top in node.tops]
        sizes = {top.shape[axis] for top in inputs for axis, one in enumerate(varying.get(top.name, ())) if one}
        self.batch = sizes.pop() if len(sizes) == 1 else -1
        """The size that is called N in shapes; -1: inputs have several."""

    def add(self, node: Node) -> None:
        """Add a layer."""
        if node.layer.type == "Input":
            self._add_inputs(node)
            return
        first = len(self.graph.nodes)
        inputs = [self.values[bottom] for bottom in node.bottoms]
        view = LayerView(self.graph, node.layer, inputs, node.bottoms, node.tops, self.varying)
        found = EXPORTERS.get(node.layer.type)(view)
        results = [found] if isinstance(found, str) else list(found or ())
        made = {output for one in self.graph.nodes[first:] for output in one.output}
        for top, value in zip(node.tops, results, strict=True):
            self.values[top] = self._named(node, top, value, first) if value in made else value
        self.resized |= self._resized(node)
        if node.layer.type in COMPOSITES:
            self._describe(node, inputs, first)

    def _add_inputs(self, node: Node) -> None:
        read = {bottom for other in self.net.nodes for bottom in other.bottoms}
        for top in node.tops:
            if top in read:
                self.values[top] = top.name
                self.inputs.append(self._info(top, top.name))

    def _named(self, node: Node, top: Blob, value: str, first: int) -> str:
        """A value under its blob's name, or where a later layer works in place under one with the layer's."""
        taken = self.last[top] is not node or top.name in (info.name for info in self.inputs)
        name = self.graph.new_name(f"{top.name}/{node.layer.name}") if taken else top.name
        self.graph.rename(first, value, name)
        return name

    def _resized(self, node: Node) -> set[Blob]:
        changes = node.layer.changes_shapes or any(bottom in self.resized for bottom in node.bottoms)
        return set(node.tops) if changes else set()

    def _describe(self, node: Node, inputs: list[str], first: int) -> None:
        """Note what a layer was that became the nodes from number `first` on, so that it can be read back."""
        param = caffe_pb2.LayerParameter()
        param.CopyFrom(node.layer.param)
        for name in ("blobs", "bottom", "top", "phase", "include", "exclude", "loss_weight", "propagate_down"):
            param.ClearField(name)
        read = {name for one in self.graph.nodes[first:] for name in one.input}
        stored = sorted((name for name in self.graph.constants if name in read), key=_parameter_order)
        self.metadata[self.graph.new_name(f"{COMPOSITE_KEY}{node.layer.name}")] = json.dumps(
            {
                "param": text_format.MessageToString(param, as_one_line=True),
                "inputs": inputs,
                "outputs": [self.values[top] for top in node.tops],
                "parameters": [name for name in stored if _parameter_order(name) >= 0],
            }
        )

    def _info(self, blob: Blob, name: str) -> ValueInfoProto:
        varies = self.varying.get(blob.name, [False] * len(blob.shape))
        shape: list[int | str] = [f"{name}_{axis}" for axis in range(len(blob.shape))]
        for axis, (size, one) in enumerate(zip(blob.shape, varies, strict=True)):
            if blob not in self.resized and (not one or size == self.batch):
                shape[axis] = "N" if one else size
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    def _outputs(self) -> list[ValueInfoProto]:
        infos = []
        for name, blob in self.net.outputs.items():
            if blob not in self.values:
                continue
            if self.values[blob] != name:  # the value of another blob, or an input changed in place
                taken = name in (info.name for info in self.inputs)
                output = self.graph.new_name(f"{name}/output") if taken else name
                self.graph.nodes.append(helper.make_node("Identity", [self.values[blob]], [output], name=output))
                infos.append(self._info(blob, output))
            else:
                infos.append(self._info(blob, name))
        return infos

    def model(self) -> ModelProto:
        """The whole model."""
        outputs = self._outputs()
        if not outputs:
            raise ConfigError(f"net '{self.net.name}' has no output: layers read each of its blobs")
        graph = helper.make_graph(
            self.graph.nodes, self.net.name or "net", self.inputs, outputs, list(self.graph.constants.values())
        )
        version = helper.make_opsetid("", self.graph.opset)
        model = helper.make_model(
            graph,
            opset_imports=[version],
            producer_name="caffepy",
            producer_version=__version__,
            ir_version=helper.find_min_ir_version_for([version]),
        )
        helper.set_model_props(model, self.metadata)
        return model


def _parameter_order(name: str) -> int:
    """Which parameter of its layer a constant is, -1: none."""
    last = name.rpartition("/")[2].partition("_")[0]
    return PARAMETER_NAMES.index(last) if last in PARAMETER_NAMES else -1
