"""An ONNX file as a Caffe net with its parameters, built, written in Caffe's formats and compared with the file."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from caffepy.backend import create_backend
from caffepy.errors import ConfigError, RunError, one_line
from caffepy.export.check import Difference, compare, random_inputs, refuse_large, run_net
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import COMPOSITE_KEY
from caffepy.export.onnx_import import rules
from caffepy.export.onnx_import.evaluate import EVALUATORS, evaluate
from caffepy.export.onnx_import.graph import IMPORTERS, NetBuilder, NodeView, Tensor, UnsupportedError, Value
from caffepy.export.onnx_import.model import (
    MAX_BYTES,
    check_size,
    constants_of,
    describe,
    in_order,
    opset_of,
    read_model,
)
from caffepy.export.prepare import fold_batch_norms, merge_scales
from caffepy.formats.caffemodel import read_caffemodel, write_caffemodel
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.export_rules import ONNX, import_families
from caffepy.net import Net
from caffepy.utils.files import atomic_write, check_writable

_ = rules  # its functions register themselves

COMPOSITE = "caffepy.Layer"
"""The operator that stands for several nodes which were one layer of Caffe."""
_LONGEST_LAYER = 10_000
"""Characters of a layer's prototxt in the metadata."""
_NUMBERS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}

_KNOWN = _NUMBERS | {TensorProto.INT64}

Shapes = Mapping[str, Sequence[int]]


def read_onnx(path: Path, name: str, batch: int = 1, shapes: Shapes | None = None) -> caffe_pb2.NetParameter:
    """The net that an ONNX file holds, its layers with their parameters.

    Raises:
        ConfigError: the file is no ONNX model or is damaged, or Caffe's layers cannot say some of its nodes: all are
            listed.
    """
    model = read_model(path)
    return _Reader(model, path, name).read(batch, shapes or {})


class _Reader:
    """One model while it is read.

    Args:
        model: the model.
        path: its file, for messages.
        name: the net's name.
    """

    def __init__(self, model: ModelProto, path: Path, name: str) -> None:
        self.graph, self.path = model.graph, path
        self.opset = opset_of(model, path)
        self.net = NetBuilder(name)
        self.values: dict[str, Value] = {}
        self.problems: list[str] = []
        self.composites = _restore_composites(model)
        """The layers that several nodes were, by the name of the node that stands for them."""
        self.nodes = in_order(self.graph, path)
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for value in node.input:
                self.readers.setdefault(value, []).append(node)

    def read(self, batch: int, shapes: Shapes) -> caffe_pb2.NetParameter:
        """See `read_onnx`."""
        self._refuse_unknown()
        self.values.update(constants_of(self.graph, self.path))
        for info in self.graph.input:
            if info.name not in self.values:
                self._add_input(info, self._shape(info, batch, shapes))
        self.net.reserve([info.name for info in self.graph.output])
        for node in self.nodes:
            self._convert(node)
        self._raise_problems()
        return self._finished()

    def _refuse_unknown(self) -> None:
        """List at once all nodes that no function is registered for."""
        for node in self.nodes:
            known = node.op_type in IMPORTERS or node.op_type in EVALUATORS or node.op_type in ("Shape", "Size")
            if not known or node.domain not in ("", "ai.onnx"):
                kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
                if kind != COMPOSITE:
                    self.problems.append(f"'{describe(node)}' ({kind}): Caffe has no layer for it")

    def _raise_problems(self) -> None:
        if self.problems:
            listed = "; ".join(one_line(problem) for problem in self.problems)
            raise ConfigError(f"{self.path}: {len(self.problems)} nodes cannot be said by Caffe's layers: {listed}")

    # -- inputs and outputs ----------------------------------------------------------------------------

    def _shape(self, info: ValueInfoProto, batch: int, shapes: Shapes) -> tuple[int, ...]:
        """An input's shape."""
        where = f"{self.path}: input '{info.name}'"
        kind = info.type.tensor_type
        if not info.type.HasField("tensor_type") or kind.elem_type not in _KNOWN:
            raise ConfigError(f"{where} is no tensor of floats, the only inputs of a Caffe net")
        given = shapes.get(info.name) or (shapes.get("") if len(self._inputs()) == 1 else None)
        if given:
            shape = tuple(given)
        else:
            sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
            shape = tuple(batch if axis == 0 and size < 1 else size for axis, size in enumerate(sizes))
        if not shape or any(size < 1 for size in shape):
            raise ConfigError(f"{where} leaves axes open; give its shape with --shape {info.name}=1,3,224,224")
        check_size(shape, where)
        return shape

    def _inputs(self) -> list[str]:
        stored = {tensor.name for tensor in self.graph.initializer}
        return [info.name for info in self.graph.input if info.name not in stored]

    def _add_input(self, info: ValueInfoProto, shape: tuple[int, ...]) -> None:
        try:
            self.values[info.name] = self.net.add_input(info.name, shape)
        except UnsupportedError as error:
            raise ConfigError(f"{self.path}: input '{info.name}': {error}") from error

    def _finished(self) -> caffe_pb2.NetParameter:
        outputs = []
        for info in self.graph.output:
            value = self.values.get(info.name)
            if not isinstance(value, Tensor):
                raise ConfigError(f"{self.path}: output '{info.name}' does not depend on the inputs")
            if value.name == info.name:
                raise ConfigError(f"{self.path}: output '{info.name}' is an input of the model")
            outputs.append((info.name, value))
        if len({name for name, _ in outputs}) < len(outputs) or not outputs:
            raise ConfigError(f"{self.path}: the model has no outputs, or one of them twice")
        try:
            return self.net.finish(outputs)
        except UnsupportedError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    # -- nodes -----------------------------------------------------------------------------------------

    def _convert(self, node: NodeProto) -> None:
        if any(name and name not in self.values for name in node.input):
            return  # a node before it is among the problems
        inputs = [self.values[name] if name else None for name in node.input]
        view = NodeView(node, inputs, self.net, self.opset, self.readers.get(next(iter(node.output), ""), ()))
        try:
            results = self._results(view)
        except UnsupportedError as error:
            self.problems.append(f"'{describe(node)}' ({node.op_type}): {error}")
            return
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:  # attributes of other types or sizes
            problem = f"its attributes or constants do not fit: {type(error).__name__}: {error}"
            self.problems.append(f"'{describe(node)}' ({node.op_type}): {problem}")
            return
        for name, value in zip(node.output, results, strict=False):
            if name and value is not None:
                self.values[name] = value

    def _results(self, view: NodeView) -> Sequence[Value | None]:
        node = view.node
        if node.op_type in ("Shape", "Size") and view.has(0):
            return [_shape_of(view)]
        if node.domain == "caffepy":
            return _composite(view, self.composites[node.name])
        constants = [value for value in view.inputs if isinstance(value, np.ndarray)]
        if len(constants) == sum(value is not None for value in view.inputs) and node.op_type in EVALUATORS:
            return list(evaluate(view, constants))
        if node.op_type not in IMPORTERS:
            if node.op_type in EVALUATORS:
                raise UnsupportedError("Caffe has no layer for it, unless its inputs are constant")
            return []  # it is among the problems
        found = IMPORTERS.get(node.op_type)(view)
        return [found] if isinstance(found, Tensor | np.ndarray) else found


def input_types(path: Path) -> dict[str, np.dtype[Any]]:
    """NumPy's types of a model's inputs, by name."""
    graph = read_model(path).graph
    kinds = {info.name: info.type.tensor_type.elem_type for info in graph.input}
    return {name: helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items() if kind in _KNOWN}


def _shape_of(view: NodeView) -> np.ndarray[Any, Any]:
    """The result of Shape or Size, known from the net's shapes."""
    sizes = np.array(view.value(0).shape, np.int64)
    if view.node.op_type == "Size":
        return np.array(sizes.prod(), np.int64)
    begin, end = view.number("start", 0), view.number("end", len(sizes))
    return sizes[begin:end]


def _restore_composites(model: ModelProto) -> dict[str, dict[str, Any]]:
    """Replace the nodes of one layer by one node, according to the metadata; the others have no readers then."""
    found: dict[str, dict[str, Any]] = {}
    for entry in model.metadata_props:
        if not entry.key.startswith(COMPOSITE_KEY) or len(entry.value) > _LONGEST_LAYER:
            continue
        try:
            description = json.loads(entry.value)
            names = {key: [str(name) for name in description[key]] for key in ("inputs", "outputs", "parameters")}
            description = {"param": str(description["param"]), **names}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        _replace(model, entry.key, description)
        found[entry.key] = description
    if found:
        _remove_unread(model)
    return found


def _replace(model: ModelProto, name: str, description: dict[str, Any]) -> None:
    graph = model.graph
    for node in graph.node:
        for index, output in enumerate(node.output):
            if output in description["outputs"]:
                node.output[index] = f"{output}/replaced"
    inputs = [*description["inputs"], *description["parameters"]]
    graph.node.append(helper.make_node("Layer", inputs, description["outputs"], name=name, domain="caffepy"))


def _remove_unread(model: ModelProto) -> None:
    """Remove nodes that no output needs."""
    wanted = {info.name for info in model.graph.output}
    producers = {name: node for node in model.graph.node for name in node.output}
    waiting, seen = list(wanted), set(wanted)
    kept: set[int] = set()
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and id(node) not in kept:
            kept.add(id(node))
            fresh = [name for name in node.input if name and name not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
    nodes = [node for node in model.graph.node if id(node) in kept]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _composite(view: NodeView, description: dict[str, Any]) -> Sequence[Value | None]:
    """The layer that several nodes were."""
    param = caffe_pb2.LayerParameter()
    try:
        text_format.Parse(description["param"], param)
    except text_format.ParseError as error:
        raise UnsupportedError(f"its description is no layer: {error}") from error
    import_families([param.type])
    if param.type not in ONNX.composites or Counter(view.node.output).most_common(1)[0][1] > 1:
        raise UnsupportedError(f"its description names the layer type '{param.type:.40}', which is not read back")
    param.detection_output_param.ClearField("save_output_param")  # a model from elsewhere must not name files to write
    count = len(description["inputs"])
    bottoms = [view.blob(index) for index in range(count)]
    blobs = [np.asarray(view.constant(index), np.float32) for index in range(count, len(view.inputs))]
    fields = {
        field.name: value for field, value in param.ListFields() if field.name.endswith("_param") and field.message_type
    }
    tops = list(view.node.output)
    made = view.net.add_many(param.type, bottoms, param.name or view.name, tops, blobs, reshape_blobs=True, **fields)
    return list(made)


def build_imported(
    path: Path, name: str, batch: int = 1, shapes: Shapes | None = None, fold: bool = False
) -> tuple[caffe_pb2.NetParameter, Net]:
    """The net of an ONNX file, as a prototxt without parameters and built with them.

    Args:
        path: the file.
        name: the net's name.
        batch: the first axis of inputs where the file leaves it open.
        shapes: whole shapes of inputs, by name; "" for the only one.
        fold: merge BatchNorm and Scale into the layers before them.

    Raises:
        ConfigError: see `read_onnx`.
    """
    whole = read_onnx(path, name, batch, shapes)
    whole = fold_batch_norms(whole) if fold else merge_scales(whole)
    backend = create_backend()
    with backend.activate():
        net = Net(whole, LayerContext(backend, phase=caffe_pb2.TEST))
        net.copy_trained_layers_from(whole, str(path))
    param = caffe_pb2.NetParameter()
    param.CopyFrom(whole)
    for layer in param.layer:
        del layer.blobs[:]
    return param, net


def check_imported(path: Path, net: Net) -> list[Difference]:
    """How far the net's outputs differ from those of the ONNX file on random input.

    Raises:
        RunError: by too much, or onnxruntime cannot run the file.
    """
    types = input_types(path)
    inputs = random_inputs(net)
    feeds = {name: values.astype(types.get(name, np.dtype(np.float32))) for name, values in inputs.items()}
    found = run_net(net, {name: values.astype(np.float32) for name, values in feeds.items()})
    wanted = {name: np.asarray(values) for name, values in run_model(str(path), feeds).items()}
    differences = compare(found, wanted)
    refuse_large(differences)
    return differences


def imported_paths(base: Path) -> tuple[Path, Path]:
    """Return the paths of the prototxt and the .caffemodel; `base` is their path without the ending."""
    return base.with_name(f"{base.name}.prototxt"), base.with_name(f"{base.name}.caffemodel")


def write_imported(
    base: Path, param: caffe_pb2.NetParameter, net: Net, check: Callable[[Net], None] | None = None
) -> tuple[Path, Path]:
    """Write the prototxt and the .caffemodel; returns their paths.

    Args:
        base: the paths without their endings.
        param: the net without its parameters.
        net: the net with its parameters.
        check: called with the net that the two files load as; if it raises, neither file is there.

    Raises:
        RunError: a file cannot be written.
    """
    try:
        text = text_format.MessageToString(param).encode()
    except UnicodeError as error:
        raise ConfigError(f"{base.name}: a name is not UTF-8") from error
    prototxt, weights = imported_paths(base)
    if len(text) > MAX_BYTES:
        raise RunError(f"{prototxt}: would be larger than protobuf can read")
    for path in (prototxt, weights):
        check_writable(path)
    with tempfile.TemporaryDirectory(prefix=".caffepy-import-", dir=base.parent) as folder:
        written = Path(folder, prototxt.name), Path(folder, weights.name)
        with atomic_write(written[0]) as file:
            file.write(text)
        write_caffemodel(written[1], net.name, net.layers)
        if check is not None:
            check(_load(*written))
        for path in (weights, prototxt):
            os.replace(Path(folder, path.name), path)
    return prototxt, weights


def _load(prototxt: Path, weights: Path) -> Net:
    """The net of two files, in the dialect that the prototxt's fields choose."""
    backend = create_backend()
    with backend.activate():
        net = Net(read_net(prototxt), LayerContext(backend, phase=caffe_pb2.TEST))
        net.copy_trained_layers_from(read_caffemodel(weights), str(weights))
    return net
