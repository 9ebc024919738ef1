"""A net as an ONNX model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from google.protobuf import text_format
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from caffepy.errors import ConfigError
from caffepy.export.lowering import Lowering, Varying
from caffepy.export.onnx import rules
from caffepy.export.onnx.libraries import run_model
from caffepy.export.prepare import as_half
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import ONNX, PARAMETER_NAMES, OnnxLayer
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.version import __version__

_ = rules  # its functions register themselves

OLDEST, DEFAULT, NEWEST = 13, 17, 21
"""Versions of ONNX's operators that can be written."""
LARGEST_MODEL = 2**31 - 1
"""Bytes that protobuf can hold."""
LEAST_HALF = 16
"""Elements of a constant from which on it is stored as float16."""
COMPOSITE_KEY = "caffepy.layer."
"""Before a layer's name, a key of the model's metadata: what a layer was that became several nodes."""


@dataclass
class Graph:
    """Nodes and constants.

    Args:
        opset: the version of the operators.
    """

    opset: int = DEFAULT
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    """The next number behind each name that `new_name` has given."""

    def new_name(self, wanted: str) -> str:
        """A name of a value or node that nothing has yet."""
        name, number = wanted, self.numbers.get(wanted, 1)
        while name in self.names:
            name, number = f"{wanted}_{number}", number + 1
        self.names.add(name)
        self.numbers[wanted] = number
        return name

    def constant(self, values: NDArray[Any], wanted: str) -> str:
        """A constant's name."""
        name = self.new_name(wanted)
        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
        return name

    def add(self, where: str, operator: str, inputs: Sequence[str], count: int = 1, **attributes: Any) -> list[str]:
        """A node of a layer; its outputs' names."""
        name = self.new_name(f"{where}/{operator}")
        outputs = [self.new_name(f"{name}:{index}" if count > 1 else f"{name}:") for index in range(count)]
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name=name, **attributes))
        return outputs

    def rename(self, first: int, old: str, new: str) -> None:
        """Give a value that a node from number `first` on makes another name."""
        for node in self.nodes[first:]:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == old:
                        names[index] = new


def to_model(net: Net, opset: int = DEFAULT, varying: Varying | None = None, half: bool = False) -> ModelProto:
    """A net as an ONNX model.

    Args:
        net: in phase TEST, with its weights, on a backend that holds values.
        opset: the version of the operators.
        varying: see `Varying`; None: the batch is the net's.
        half: store parameters that float16 holds exactly as float16, each with a Cast to float32.

    Raises:
        ConfigError: layers have no ONNX form, all of which are named, the net has no output, or `opset` is unknown.
    """
    if not OLDEST <= opset <= NEWEST:
        raise ConfigError(f"opset is {opset}; {OLDEST} to {NEWEST} can be written")
    writer = _Writer(net, Graph(opset), varying)
    writer.add_layers()
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
    content = bytes(model.SerializeToString())
    onnx.checker.check_model(content)
    return content


def run_as_onnx(net: Net, feeds: Mapping[str, NDArray[Any]], opset: int = DEFAULT) -> dict[str, NDArray[Any]]:
    """Export a net in memory and return its outputs, computed by onnxruntime.

    Raises:
        ConfigError: a layer has no ONNX form.
        RunError: onnxruntime fails.
    """
    return run_model(serialised(to_model(net, opset)), feeds)


class _Writer(Lowering):
    """A graph while it grows, layer by layer.

    Args:
        net: the net.
        graph: its nodes.
        varying: see `to_model`.
    """

    def __init__(self, net: Net, graph: Graph, varying: Varying | None) -> None:
        super().__init__(net, ONNX, varying)
        self.graph = graph
        self.last = {top: node for node in net.nodes for top in node.tops}
        """Which layer writes each blob last."""
        self.infos: list[ValueInfoProto] = []
        """Of the inputs."""
        self.metadata: dict[str, str] = {}
        self.resized: set[Blob] = set()
        """Blobs whose shape depends on numbers."""
        self.graph.names |= set(net.blobs)
        inputs = [top for node in net.nodes if node.layer.type == "Input" for top in node.tops]
        sizes = {top.shape[axis] for top in inputs for axis, one in enumerate(self.varying.get(top.name, ())) if one}
        self.batch = sizes.pop() if len(sizes) == 1 else -1
        """The size that is called N in shapes; -1: inputs have several."""

    def input_name(self, top: Blob) -> str:
        """The blob's own name."""
        self.infos.append(self._info(top, top.name))
        return top.name

    def add(self, index: int, node: Node, inputs: list[str]) -> None:
        """Add a layer."""
        first = len(self.graph.nodes)
        found = ONNX.functions.get(node.layer.type)(
            OnnxLayer(self.graph, node.layer, inputs, node.bottoms, node.tops, self.varying)
        )
        results = [found] if isinstance(found, str) else list(found or ())
        made = {output for one in self.graph.nodes[first:] for output in one.output}
        for top, value in zip(node.tops, results, strict=True):
            self.values[top] = self._named(node, top, value, first) if value in made else value
        if node.layer.changes_shapes or not self.resized.isdisjoint(node.bottoms):
            self.resized |= set(node.tops)
        if node.layer.type in ONNX.composites:
            self._describe(node, inputs, first)

    def _named(self, node: Node, top: Blob, value: str, first: int) -> str:
        """A value under its blob's name, or where a later layer works in place under one with the layer's."""
        taken = self.last[top] is not node or top.name in self.inputs.values()
        name = self.graph.new_name(f"{top.name}/{node.layer.name}") if taken else top.name
        self.graph.rename(first, value, name)
        return name

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

    def _output(self, name: str, blob: Blob) -> ValueInfoProto:
        if self.values[blob] == name:
            return self._info(blob, name)
        # The value of another blob, or an input changed in place.
        output = self.graph.new_name(f"{name}/output") if name in self.inputs.values() else name
        self.graph.nodes.append(helper.make_node("Identity", [self.values[blob]], [output], name=output))
        return self._info(blob, output)

    def model(self) -> ModelProto:
        """The whole model."""
        outputs = [self._output(name, blob) for name, blob in self.outputs().items()]
        graph = helper.make_graph(
            self.graph.nodes, self.net.name or "net", self.infos, outputs, list(self.graph.constants.values())
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
